# Every policy of an arm on held-out problems, through lm-eval, in one process or several.


rule evaluate:
    input:
        problems=rules.problems.output.evaluation,
        policies=lambda wildcards: [
            policy_folder(wildcards.study, wildcards.arm, seed)
            for seed in seeds_of(wildcards)
        ],
        snapshots=lambda wildcards: snapshot_folders(wildcards.study, wildcards.arm),
    output:
        summary=f"{R}/eval/{{arm}}.json",
        samples=f"{R}/eval/{{arm}}.samples.jsonl",
        manifest=f"{R}/eval/{{arm}}.manifest.json",
    log:
        f"{R}/logs/evaluate/{{arm}}.log",
    benchmark:
        f"{R}/benchmarks/evaluate/{{arm}}.jsonl"
    conda:
        conda_env
    threads: 1
    # Processes that share the policies, each with a GPU where there are any: `--set-resources evaluate:ranks=2`.
    resources:
        **asked(
            lambda wildcards: evaluation_request(
                study_of(wildcards), policies_of(wildcards), sharing(wildcards)
            )
        ),
        ranks=1,
        gpu=lambda wildcards: sharing(wildcards),
    params:
        settings=settings_file(evaluation_of),
        compared=compared(evaluation_of),
        sources=sources(evaluation_files),
        policies=lambda wildcards, input: [
            f"--policy={seed}={folder}"
            for seed, folder in zip(seeds_of(wildcards), input.policies)
        ],
        snapshots=lambda wildcards, input: [
            f"--snapshots={seed}={folder}"
            for seed, folder in zip(seeds_of(wildcards), input.snapshots)
        ],
    message:
        f"evaluate {{wildcards.arm}}{OF_PART}\nlog: {{log}}"
    # Started once more, it goes on with the policies that are left.
    shell:
        once_more(
            "tailrl job evaluate --arm {wildcards.arm:q} --settings {params.settings:q} {params.policies:q} "
            "{params.snapshots:q} --problems {input.problems:q} --out {output.summary:q} --samples {output.samples:q} "
            "--ranks {resources.ranks:q}"
        )
