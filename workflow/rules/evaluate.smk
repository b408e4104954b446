# Every policy of an arm on held-out problems, through lm-eval, in one process or several.


rule evaluate:
    input:
        problems=rules.problems.output.evaluation,
        policies=lambda wildcards: [
            policy_folder(wildcards.arm, seed) for seed in arm_seeds(wildcards.arm)
        ],
        snapshots=lambda wildcards: snapshot_folders(wildcards.arm),
        code=job_files("evaluate", study.evaluation),
    output:
        summary=f"{results}/eval/{{arm}}.json",
        samples=f"{results}/eval/{{arm}}.samples.jsonl",
        manifest=f"{results}/eval/{{arm}}.manifest.json",
    log:
        f"{results}/logs/evaluate/{{arm}}.log",
    benchmark:
        f"{results}/benchmarks/evaluate/{{arm}}.jsonl"
    conda:
        conda_env
    threads: 1
    # Processes that share the policies, each with a GPU where there are any: `--set-resources evaluate:ranks=2`.
    resources:
        **asked(
            lambda wildcards: evaluation_request(
                study, policies_of(wildcards.arm), sharing(wildcards.arm)
            )
        ),
        ranks=1,
        gpu=lambda wildcards: sharing(wildcards.arm),
    params:
        settings=in_file(
            lambda wildcards: evaluation_of(wildcards.arm).model_dump_json()
        ),
        compared=lambda wildcards: compared(evaluation_of(wildcards.arm)),
        sources=sources(job_files("evaluate", study.evaluation)),
        policies=lambda wildcards, input: [
            f"--policy={seed}={folder}"
            for seed, folder in zip(arm_seeds(wildcards.arm), input.policies)
        ],
        snapshots=lambda wildcards, input: [
            f"--snapshots={seed}={folder}"
            for seed, folder in zip(arm_seeds(wildcards.arm), input.snapshots)
        ],
    message:
        "evaluate {wildcards.arm}\nlog: {log}"
    # Started once more, it goes on with the policies that are left.
    shell:
        once_more(
            "tailrl job evaluate --arm {wildcards.arm:q} --settings {params.settings:q} {params.policies:q} "
            "{params.snapshots:q} --problems {input.problems:q} --out {output.summary:q} --samples {output.samples:q} "
            "--ranks {resources.ranks:q}"
        )
