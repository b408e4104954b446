# Tables, figures and pages of a study or of one of its parts, and the page over its parts.

drawn = [*FIGURES, *(SNAPSHOT_FIGURES if has_snapshots else ())]
tables = [*TABLES, *(f"{figure}.csv" for figure in drawn if figure not in FIGURES)]
SHOWN = ("evaluation.csv", "differences.csv", "claims.csv", "survival.csv")


rule summarise:
    input:
        results=lambda wildcards: arm_results(wildcards.study, study_of(wildcards).arms),
    output:
        page=report(
            f"{R}/summary.html",
            caption=caption_of("summary"),
            category="Summary",
            labels={"study": "{study}"},
        ),
        summary=f"{R}/summary.md",
        figures=[
            report(
                f"{R}/figures/{figure}.svg",
                caption=caption_of(figure),
                category="Figures",
                labels={"study": "{study}", "figure": figure},
            )
            for figure in drawn
        ],
        tables=[
            report(
                f"{R}/tables/{table}",
                caption=caption_of(Path(table).stem),
                category="Tables",
                labels={"study": "{study}", "table": Path(table).stem},
            )
            for table in SHOWN
        ],
        more_tables=[f"{R}/tables/{table}" for table in tables if table not in SHOWN],
        pdfs=[f"{R}/figures/{figure}.pdf" for figure in drawn],
    log:
        f"{R}/logs/summarise.log",
    conda:
        conda_env
    params:
        study=in_file(compared(summarised)),
        compared=compared(summarised),
        sources=sources(job_files("summarise")),
        results=subpath(output.summary, parent=True),
    message:
        f"tables, figures and summary{OF_PART}\nlog: {{log}}"
    shell:
        "tailrl job summarise --study {params.study:q} --results {params.results:q} --out {params.results:q} 2> {log:q}"


rule ablation:
    input:
        results=ablated_results,
    output:
        table=f"{R}/ablations/{{ablation}}.md",
        page=f"{R}/ablations/{{ablation}}.html",
        csv=f"{R}/ablations/{{ablation}}.csv",
        figure=f"{R}/ablations/{{ablation}}.svg",
        claims=f"{R}/ablations/{{ablation}}_claims.csv",
        differences=f"{R}/ablations/{{ablation}}_differences.csv",
        each=[
            f"{R}/ablations/{{ablation}}_{table}.csv.gz"
            for table in ("problems", "rewards")
        ],
    log:
        f"{R}/logs/ablation_{{ablation}}.log",
    conda:
        conda_env
    params:
        study=in_file(compared(reported)),
        compared=compared(reported),
        sources=sources(job_files("ablation")),
        results=subpath(output.table, ancestor=2),
    message:
        f"table and figure of the ablation {{wildcards.ablation}}{OF_PART}\nlog: {{log}}"
    shell:
        "tailrl job ablation --study {params.study:q} --name {wildcards.ablation:q} --results {params.results:q} "
        "--out {params.results:q} 2> {log:q}"


if whole.pooled:

    # `pooled` is of all parts, `finished` of those that are there or published: it asks for none of them, and takes their
    # tables as they are.
    rule pool:
        input:
            tables=lambda wildcards: (
                tables_to_pool(wildcards) if wildcards.which == "pooled" else []
            ),
        output:
            [f"results/{whole.name}/{{which}}/{file}" for file in whole.pooled.outputs],
        log:
            f"results/{whole.name}/logs/{{which}}.log",
        wildcard_constraints:
            which="pooled|finished",
        localrule: True
        conda:
            conda_env
        params:
            study=in_file(lambda wildcards: whole.model_dump_json(exclude_unset=True)),
            compared=lambda wildcards: whole.pooled.model_dump_json(),
            tables=lambda wildcards: (
                digest_of_files(tables_to_pool(wildcards))
                if wildcards.which == "finished"
                else ""
            ),
            parts=lambda wildcards: [
                f"--part={folder}" for folder in folders_to_pool(wildcards)
            ],
            sources=sources(job_files("pool")),
            out=subpath(output[0], parent=True),
        message:
            f"page over the parts of {whole.name} ({{wildcards.which}})\nlog: {{log}}"
        shell:
            "tailrl job pool --study {params.study:q} {params.parts:q} --out {params.out:q} 2> {log:q}"
