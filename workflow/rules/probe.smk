# What can be said without training: the arms' gradient estimators against the exact gradient, the engines' whole
# distributions against the trainer's, and thresholds of other rules that prune as much as min-p.


rule measure_gradients:
    output:
        qualities=f"{R}/gradients/quality.jsonl",
        run=f"{R}/gradients/run.json",
        manifest=f"{R}/gradients/manifest.json",
    log:
        f"{R}/logs/gradients.log",
    benchmark:
        f"{R}/benchmarks/gradients.jsonl"
    conda:
        conda_env
    threads: 1
    params:
        settings=in_file(lambda wildcards: compared(gradients_of)(wildcards)),
        compared=compared(gradients_of),
        sources=sources(
            lambda wildcards: job_files("measure_gradients", gradients_of(wildcards))
        ),
        out=subpath(output.qualities, parent=True),
    message:
        f"gradient estimators on tiny models{OF_PART}\nlog: {{log}}"
    shell:
        "tailrl job measure-gradients --settings {params.settings:q} --out {params.out:q} 2> {log:q}"


rule gradient_page:
    input:
        qualities=rules.measure_gradients.output.qualities,
        run=rules.measure_gradients.output.run,
        manifest=rules.measure_gradients.output.manifest,
    output:
        table=f"{R}/gradients/gradient_quality.csv",
        models=f"{R}/gradients/models.csv",
        page=f"{R}/gradients/gradient_quality.md",
        figure=f"{R}/gradients/gradient_quality.svg",
        claims=f"{R}/gradients/claims.csv",
    log:
        f"{R}/logs/gradient_quality.log",
    conda:
        conda_env
    params:
        results=subpath(input.qualities, parent=True),
        sources=sources(job_files("gradient_page")),
        out=subpath(output.table, parent=True),
    message:
        "table and figure of the gradient estimators\nlog: {log}"
    shell:
        "tailrl job gradient-page --results {params.results:q} --out {params.out:q} 2> {log:q}"


rule compare:
    input:
        problems=rules.problems.output.train,
        policy=rules.policy.output,
    output:
        positions=f"{R}/distributions/{{engine}}/positions.npz",
        run=f"{R}/distributions/{{engine}}/run.json",
        manifest=f"{R}/distributions/{{engine}}/manifest.json",
    log:
        f"{R}/logs/distributions/{{engine}}.log",
    benchmark:
        f"{R}/benchmarks/distributions/{{engine}}.jsonl"
    conda:
        conda_env
    threads: 1
    resources:
        **asked(lambda wildcards: comparison_request(study_of(wildcards))),
        gpu=1,
    params:
        settings=settings_file(comparison_of),
        compared=compared(comparison_of),
        sources=sources(
            lambda wildcards: job_files("compare", comparison_of(wildcards))
        ),
        out=subpath(output.run, parent=True),
    message:
        f"distributions of {{wildcards.engine}}{OF_PART}\nlog: {{log}}"
    shell:
        once_more(
            "tailrl job compare --settings {params.settings:q} --policy {input.policy:q} "
            "--problems {input.problems:q} --out {params.out:q}"
        )


rule distribution_page:
    input:
        compared=lambda wildcards: [
            f"results/{wildcards.study}/distributions/{engine}/{name}"
            for engine in engines_of(wildcards)
            for name in ("positions.npz", "run.json", "manifest.json")
        ],
    output:
        tables=[
            f"{R}/distributions/{table}"
            for table in (
                *distributions.TABLES,
                *(distributions.FLIP_TABLES if says_experts else ()),
            )
        ],
        text=f"{R}/distributions/distributions.md",
        page=f"{R}/distributions/distributions.html",
        figure=f"{R}/distributions/distributions.svg",
    log:
        f"{R}/logs/distributions.log",
    conda:
        conda_env
    params:
        sources=sources(job_files("distribution_page")),
        engines=lambda wildcards: [
            f"--engine={engine}" for engine in engines_of(wildcards)
        ],
        out=subpath(output.page, parent=True),
    message:
        f"tables and figure of the distributions{OF_PART}\nlog: {{log}}"
    shell:
        "tailrl job distribution-page --results {params.out:q} {params.engines:q} --out {params.out:q} 2> {log:q}"


rule equal_mass_table:
    input:
        problems=rules.problems.output.train,
        policy=rules.policy.output,
    output:
        f"{R}/distributions/equal_mass.csv",
    log:
        f"{R}/logs/equal_mass.log",
    benchmark:
        f"{R}/benchmarks/equal_mass.jsonl"
    conda:
        conda_env
    threads: 1
    resources:
        **asked(lambda wildcards: comparison_request(study_of(wildcards))),
        gpu=1,
    params:
        settings=settings_file(trainers_own),
        compared=compared(trainers_own),
        sources=sources(
            lambda wildcards: job_files("equal_mass_table", trainers_own(wildcards))
        ),
    message:
        "thresholds of equal kept mass\nlog: {log}"
    shell:
        "tailrl job equal-mass-table --settings {params.settings:q} --policy {input.policy:q} "
        "--problems {input.problems:q} --out {output:q} 2> {log:q}"
