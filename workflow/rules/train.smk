# One reinforcement-learning run per arm and seed.


rule train:
    input:
        problems=rules.problems.output.train,
        policy=rules.policy.output,
        code=lambda wildcards: job_files("train", runs[wildcards.arm]),
    output:
        metrics=f"{results}/train/{{arm}}/seed{{seed}}/metrics.jsonl",
        tokens=f"{results}/train/{{arm}}/seed{{seed}}/tokens.npz",
        run=f"{results}/train/{{arm}}/seed{{seed}}/run.json",
        manifest=f"{results}/train/{{arm}}/seed{{seed}}/manifest.json",
        policy=directory(f"{results}/train/{{arm}}/seed{{seed}}/policy"),
        snapshots=(
            directory(f"{results}/train/{{arm}}/seed{{seed}}/snapshots")
            if has_snapshots
            else []
        ),
    log:
        f"{results}/logs/train/{{arm}}/seed{{seed}}.log",
    benchmark:
        f"{results}/benchmarks/train/{{arm}}/seed{{seed}}.jsonl"
    conda:
        conda_env
    threads: 1
    # Processes that share a run, each with a GPU where there are any: `--set-resources train:ranks=2`, or a profile.
    resources:
        **asked(
            lambda wildcards: training_request(
                study, runs[wildcards.arm], ranks_of("train")
            )
        ),
        ranks=1,
        gpu=ranks_of("train"),
    params:
        settings=in_file(lambda wildcards: runs[wildcards.arm].model_dump_json()),
        compared=lambda wildcards: compared(runs[wildcards.arm]),
        sources=lambda wildcards: digest_of_files(
            job_files("train", runs[wildcards.arm])
        ),
        out=subpath(output.metrics, parent=True),
        wandb=subpath(output.metrics, ancestor=4),
    message:
        "train {wildcards.arm}, seed {wildcards.seed}\nlog: {log}"
    # Started once more, it goes on from its last checkpoint.
    shell:
        once_more(
            "tailrl job train --settings {params.settings:q} --seed {wildcards.seed:q} --policy {input.policy:q} "
            "--problems {input.problems:q} --out {params.out:q} --wandb {params.wandb:q} --ranks {resources.ranks:q}"
        )


for arm in study.arms:

    rule:
        name:
            f"train_{arm}"
        input:
            run_files([arm], "metrics.jsonl"),
        localrule: True
