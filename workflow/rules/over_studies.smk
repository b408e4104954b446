# Pages over the studies that are there: they compute nothing that a study has to.


rule early_warning:
    input:
        runs=finished_runs,
    output:
        page="results/early_warning/early_warning.md",
        figure="results/early_warning/early_warning.svg",
        tables=[
            f"results/early_warning/{table}.csv"
            for table in ("early_warning", "thresholds", "runs", "claims")
        ],
    log:
        "results/early_warning/early_warning.log",
    conda:
        conda_env
    params:
        studies=lambda wildcards, input: sorted(
            {str(Path(run).parents[3]) for run in input.runs}
        )
        or "results",
        sources=sources(REPORT_FILES),
        out=subpath(output.page, parent=True),
    message:
        "early warnings of a collapse\nlog: {log}"
    shell:
        "tailrl job early-warning {params.studies:q} --out {params.out:q} 2> {log:q}"


rule overview:
    input:
        claims=known_claims,
    output:
        page="results/overview/index.html",
        claims=["results/overview/claims.md", "results/overview/statements.csv"],
    log:
        "results/overview/overview.log",
    localrule: True
    conda:
        conda_env
    params:
        roots=["results", str(home / "docs/results")],
        sources=sources([*REPORT_FILES, *sorted(home.glob("workflow/report/*.rst"))]),
        out=subpath(output.page, parent=True),
    message:
        "page over all studies\nlog: {log}"
    shell:
        "tailrl job overview {params.roots:q} --out {params.out:q} 2> {log:q}"
