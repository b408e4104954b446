# What can be said without training: the arms' gradient estimators against the exact gradient, the engines' whole
# distributions against the trainer's, and thresholds of other rules that prune as much as min-p.


rule measure_gradients:
    input:
        code=job_files("measure_gradients", study.gradients()),
    output:
        qualities=f"{results}/gradients/quality.jsonl",
        run=f"{results}/gradients/run.json",
        manifest=f"{results}/gradients/manifest.json",
    log:
        f"{results}/logs/gradients.log",
    benchmark:
        f"{results}/benchmarks/gradients.jsonl"
    conda:
        conda_env
    threads: 1
    params:
        settings=in_file(lambda wildcards: compared(study.gradients())),
        compared=lambda wildcards: compared(study.gradients()),
        sources=sources(job_files("measure_gradients", study.gradients())),
        out=subpath(output.qualities, parent=True),
    message:
        "gradient estimators on tiny models\nlog: {log}"
    shell:
        "tailrl job measure-gradients --settings {params.settings:q} --out {params.out:q} 2> {log:q}"


rule gradients:
    input:
        qualities=rules.measure_gradients.output.qualities,
        run=rules.measure_gradients.output.run,
        manifest=rules.measure_gradients.output.manifest,
        code=REPORT_FILES,
    output:
        table=f"{results}/gradients/gradient_quality.csv",
        models=f"{results}/gradients/models.csv",
        page=f"{results}/gradients/gradient_quality.md",
        figure=f"{results}/gradients/gradient_quality.svg",
        claims=f"{results}/gradients/claims.csv",
    log:
        f"{results}/logs/gradient_quality.log",
    conda:
        conda_env
    params:
        results=subpath(input.qualities, parent=True),
        sources=sources(REPORT_FILES),
        out=subpath(output.table, parent=True),
    message:
        "table and figure of the gradient estimators\nlog: {log}"
    shell:
        "tailrl job gradients --results {params.results:q} --out {params.out:q} 2> {log:q}"


rule compare:
    input:
        problems=rules.problems.output.train,
        policy=rules.policy.output,
        code=lambda wildcards: job_files("compare", study.compared(wildcards.engine)),
    output:
        positions=f"{results}/distributions/{{engine}}/positions.npz",
        run=f"{results}/distributions/{{engine}}/run.json",
        manifest=f"{results}/distributions/{{engine}}/manifest.json",
    log:
        f"{results}/logs/distributions/{{engine}}.log",
    benchmark:
        f"{results}/benchmarks/distributions/{{engine}}.jsonl"
    conda:
        conda_env
    threads: 1
    resources:
        **asked(lambda wildcards: comparison_request(study)),
        gpu=1,
    params:
        settings=in_file(
            lambda wildcards: study.compared(wildcards.engine).model_dump_json()
        ),
        compared=lambda wildcards: compared(study.compared(wildcards.engine)),
        sources=lambda wildcards: digest_of_files(
            job_files("compare", study.compared(wildcards.engine))
        ),
        out=subpath(output.run, parent=True),
    message:
        "distributions of {wildcards.engine}\nlog: {log}"
    shell:
        once_more(
            "tailrl job compare --settings {params.settings:q} --policy {input.policy:q} "
            "--problems {input.problems:q} --out {params.out:q}"
        )


FLIP_TABLES = ("flips_by_layer.csv", "flips_by_margin.csv", "flips_by_problem.csv.gz")
says_experts = any(
    engine.sampler.routes for engine in study.distributions.engines.values()
)


rule distributions:
    input:
        compared=[
            f"{results}/distributions/{engine}/{name}"
            for engine in study.distributions.engines
            for name in ("positions.npz", "run.json", "manifest.json")
        ],
        code=REPORT_FILES,
    output:
        tables=[
            f"{results}/distributions/{table}"
            for table in (
                "distributions.csv",
                "safe_sets.csv",
                "probability.csv",
                "histograms.csv",
                "signature.csv",
                "claims.csv",
                *(FLIP_TABLES if says_experts else ()),
            )
        ],
        text=f"{results}/distributions/distributions.md",
        page=f"{results}/distributions/distributions.html",
        figure=f"{results}/distributions/distributions.svg",
    log:
        f"{results}/logs/distributions.log",
    conda:
        conda_env
    params:
        sources=sources(REPORT_FILES),
        engines=[f"--engine={engine}" for engine in study.distributions.engines],
        out=subpath(output.page, parent=True),
    message:
        "tables and figure of the distributions\nlog: {log}"
    shell:
        "tailrl job distributions --results {params.out:q} {params.engines:q} --out {params.out:q} 2> {log:q}"


rule equal_mass:
    input:
        problems=rules.problems.output.train,
        policy=rules.policy.output,
        code=job_files("equal_mass", study.trainers_own()),
    output:
        f"{results}/distributions/equal_mass.csv",
    log:
        f"{results}/logs/equal_mass.log",
    benchmark:
        f"{results}/benchmarks/equal_mass.jsonl"
    conda:
        conda_env
    threads: 1
    resources:
        **asked(lambda wildcards: comparison_request(study)),
        gpu=1,
    params:
        settings=in_file(lambda wildcards: study.trainers_own().model_dump_json()),
        compared=lambda wildcards: compared(study.trainers_own()),
        sources=sources(job_files("equal_mass", study.trainers_own())),
    message:
        "thresholds of equal kept mass\nlog: {log}"
    shell:
        "tailrl job equal-mass --settings {params.settings:q} --policy {input.policy:q} --problems {input.problems:q} "
        "--out {output:q} 2> {log:q}"
