# One reinforcement-learning run per arm and seed.


rule train:
    input:
        problems=rules.problems.output.train,
        policy=rules.policy.output,
    output:
        metrics=f"{R}/train/{{arm}}/seed{{seed}}/metrics.jsonl",
        tokens=f"{R}/train/{{arm}}/seed{{seed}}/tokens.npz",
        run=f"{R}/train/{{arm}}/seed{{seed}}/run.json",
        manifest=f"{R}/train/{{arm}}/seed{{seed}}/manifest.json",
        policy=directory(f"{R}/train/{{arm}}/seed{{seed}}/policy"),
        snapshots=(
            directory(f"{R}/train/{{arm}}/seed{{seed}}/snapshots")
            if has_snapshots
            else []
        ),
    log:
        f"{R}/logs/train/{{arm}}/seed{{seed}}.log",
    benchmark:
        f"{R}/benchmarks/train/{{arm}}/seed{{seed}}.jsonl"
    conda:
        conda_env
    threads: 1
    # Processes that share a run, each with a GPU where there are any: `--set-resources train:ranks=2`, or a profile.
    resources:
        **asked(
            lambda wildcards: training_request(
                study_of(wildcards), run_of(wildcards), ranks_of("train")
            )
        ),
        ranks=1,
        gpu=ranks_of("train"),
    params:
        settings=settings_file(run_of),
        compared=compared(run_of),
        sources=sources(lambda wildcards: job_files("train", run_of(wildcards))),
        out=subpath(output.metrics, parent=True),
        wandb=subpath(output.metrics, ancestor=4),
    message:
        f"train {{wildcards.arm}}, seed {{wildcards.seed}}{OF_PART}\nlog: {{log}}"
    # Started once more, it goes on from its last checkpoint.
    shell:
        once_more(
            "tailrl job train --settings {params.settings:q} --seed {wildcards.seed:q} --policy {input.policy:q} "
            "--problems {input.problems:q} --out {params.out:q} --wandb {params.wandb:q} --ranks {resources.ranks:q}"
        )
