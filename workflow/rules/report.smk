# Tables, figures, the summary, and one HTML page of them; one target for each ablation.

study_json = study.model_copy(update={"ablations": {}}).model_dump_json()


rule summarise:
    input:
        results=arm_results(study.arms),
        code=source_files("tailrl.report"),
    output:
        summary=report(f"{results}/summary.md", caption="../report/summary.rst", category="Summary"),
        figures=[
            report(f"{results}/figures/{figure}.svg", caption=f"../report/{figure}.rst", category="Figures")
            for figure in ("evaluation", "training", "mismatch", "delta", "kept", "time")
        ],
        tables=[
            report(f"{results}/tables/{table}.csv", caption=f"../report/{caption}.rst", category="Tables")
            for table, caption in (("evaluation", "evaluation"), ("differences", "differences"))
        ],
        more_tables=[f"{results}/tables/{table}.csv" for table in ("policies", "training", "mismatch", "delta", "kept", "time")],
    log:
        f"{results}/logs/summarise.log",
    conda:
        conda_env
    params:
        study=study_json,
        results=results,
    message:
        "tables, figures and summary"
    shell:
        "tailrl report --study {params.study:q} --results {params.results:q} --out {params.results:q} 2> {log:q}"


rule html:
    input:
        rules.summarise.output,
        "workflow/report/workflow.rst",
    output:
        f"{results}/report.html",
    log:
        f"{results}/logs/html.log",
    conda:
        conda_env
    params:
        study=study_json,
        target=rules.summarise.output.summary,
    message:
        "report.html"
    shell:
        "config=$(mktemp --suffix=.json) && trap 'rm -f $config' EXIT && printf %s {params.study:q} > $config && "
        "snakemake --report {output:q} --nolock --workflow-profile none --cores 1 --configfile $config "
        "-- {params.target:q} > {log:q} 2>&1"


for ablation in study.ablations:

    rule:
        name:
            f"ablate_{ablation}"
        input:
            results=arm_results(study.ablation_arms(ablation)),
            code=source_files("tailrl.report"),
        output:
            [f"{results}/ablations/{ablation}.{kind}" for kind in ("md", "csv", "svg")],
        log:
            f"{results}/logs/ablate_{ablation}.log",
        conda:
            conda_env
        params:
            study=study.model_dump_json(),
            name=ablation,
            results=results,
        message:
            "table and figure of the ablation {params.name}"
        shell:
            "tailrl ablation --study {params.study:q} --name {params.name:q} --results {params.results:q} "
            "--out {params.results:q} 2> {log:q}"
