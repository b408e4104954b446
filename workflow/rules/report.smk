# Tables, figures, the summary, and one HTML page of them; one target for each ablation.

from tailrl.analysis.pools import pools

FIGURES = ["evaluation", "training", "survival", "mismatch", "delta", "kept", "time"]
FIGURES += ["figure1"] if has_snapshots else []

# What a report does not read must not make it stale.
reported = study.model_copy(
    update={
        "gradient_quality": GradientQuality(),
        "distributions": DistributionSettings(),
    }
)
study_json = compared(reported.model_copy(update={"ablations": {}}))

CAPTIONS = [home / f"workflow/report/{figure}.rst" for figure in FIGURES]


rule summarise:
    input:
        results=arm_results(study.arms),
        code=REPORT_FILES,
        captions=CAPTIONS,
    output:
        page=report(
            f"{results}/summary.html",
            caption="../report/summary.rst",
            category="Summary",
        ),
        summary=f"{results}/summary.md",
        figures=[
            report(
                f"{results}/figures/{figure}.svg",
                caption=f"../report/{figure}.rst",
                category="Figures",
            )
            for figure in FIGURES
        ],
        tables=[
            report(
                f"{results}/tables/{table}.csv",
                caption=f"../report/{caption}.rst",
                category="Tables",
            )
            for table, caption in (
                ("evaluation", "evaluation"),
                ("differences", "differences"),
                ("claims", "claims"),
                ("survival", "survival"),
            )
        ],
        more_tables=[
            f"{results}/tables/{table}.csv"
            for table in (
                "policies",
                "arms",
                "first_k3",
                "k3_ratios",
                "flips",
                "responses",
                "course",
                *(
                    figure
                    for figure in FIGURES
                    if figure not in ("evaluation", "survival")
                ),
            )
        ],
        each=[f"{results}/tables/{table}.csv.gz" for table in ("problems", "rewards")],
    log:
        f"{results}/logs/summarise.log",
    conda:
        conda_env
    params:
        study=in_file(lambda wildcards: study_json),
        compared=plain(study_json),
        sources=sources([*REPORT_FILES, *CAPTIONS]),
        results=subpath(output.summary, parent=True),
    message:
        "tables, figures and summary\nlog: {log}"
    shell:
        "tailrl job summarise --study {params.study:q} --results {params.results:q} --out {params.results:q} 2> {log:q}"


if has_snapshots:

    rule figure1:
        input:
            f"{results}/figures/figure1.svg",
        localrule: True


rule html:
    input:
        rules.summarise.output,
        [
            home / f"workflow/report/{name}.rst"
            for name in ("workflow", "summary", "differences", "claims")
        ],
        code=home / "workflow/tailrl/report/opening.py",
        page=rules.summarise.output.page,
    output:
        f"{results}/report.html",
    log:
        f"{results}/logs/html.log",
    conda:
        conda_env
    params:
        # As short as the study's own file: Snakemake reads it as one, and such a file has a largest size.
        study=in_file(lambda wildcards: reported.model_dump_json(exclude_unset=True)),
        compared=plain(study_json),
        sources=sources([home / "workflow/tailrl/report/opening.py"]),
        snakefile=os.path.relpath(workflow.main_snakefile),
    message:
        "report.html\nlog: {log}"
    shell:
        "snakemake --report {output:q} --nolock --workflow-profile none --snakefile {params.snakefile:q} "
        "--cores 1 --configfile {params.study:q} -- {input.page:q} > {log:q} 2>&1 "
        "&& tailrl job html --report {output:q} --page {input.page:q} 2>> {log:q}"


# These look at what is there: they compute nothing that a study has to.
rule early_warning:
    input:
        runs=finished_runs,
        code=REPORT_FILES,
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


# Online it is part of the study, and renews what it made. Offline it has no output: what it says is for the terminal.
rule dashboard:
    input:
        arm_results(runs if named else study.arms),
        page=rules.summarise.output.page,
    output:
        update(f"{results}/wandb_dashboard.json") if online else [],
    log:
        f"{results}/logs/dashboard.log",
    localrule: True
    conda:
        conda_env
    params:
        place=json.dumps(
            {name: os.environ.get(name) for name in ("WANDB_PROJECT", "WANDB_ENTITY")}
        ),
        command=["job", "dashboard", "--results"] if online else ["dashboard"],
        results=subpath(input.page, parent=True),
    message:
        "W&B's workspace and report\nlog: {log}"
    shell:
        "tailrl {params.command:q} {params.results:q} 2> >(tee {log:q} >&2)"


rule overview:
    input:
        claims=known_claims,
        captions=sorted(home.glob("workflow/report/*.rst")),
        code=REPORT_FILES,
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
        sources=sources(REPORT_FILES),
        out=subpath(output.page, parent=True),
    message:
        "page over all studies\nlog: {log}"
    shell:
        "tailrl job overview {params.roots:q} --out {params.out:q} 2> {log:q}"


# Over the parts of a study, as `analysis/pools.yaml` says.
for target, pool in pools().items():

    rule:
        name:
            target
        input:
            tables=finished_parts(pool),
            code=REPORT_FILES,
        output:
            [f"results/{target}/{file}" for file in pool.outputs],
        log:
            f"results/{target}/pooled.log",
        localrule: True
        conda:
            conda_env
        params:
            name=target,
            parts=part_options,
            sources=sources(REPORT_FILES),
            out=subpath(output[0], parent=True),
        message:
            "finished parts of {params.name}\nlog: {log}"
        shell:
            "tailrl job pooled --name {params.name:q} {params.parts:q} --out {params.out:q} 2> {log:q}"


for ablation in study.ablations:

    rule:
        name:
            f"ablation_{ablation}"
        input:
            results=arm_results(study.ablation_arms(ablation)),
            code=REPORT_FILES,
        output:
            table=f"{results}/ablations/{ablation}.md",
            page=f"{results}/ablations/{ablation}.html",
            csv=f"{results}/ablations/{ablation}.csv",
            figure=f"{results}/ablations/{ablation}.svg",
            claims=f"{results}/ablations/{ablation}_claims.csv",
            differences=f"{results}/ablations/{ablation}_differences.csv",
            each=[
                f"{results}/ablations/{ablation}_{table}.csv.gz"
                for table in ("problems", "rewards")
            ],
        log:
            f"{results}/logs/ablation_{ablation}.log",
        conda:
            conda_env
        params:
            study=in_file(lambda wildcards: compared(reported)),
            compared=plain(compared(reported)),
            name=ablation,
            sources=sources(REPORT_FILES),
            results=subpath(output.table, ancestor=2),
        message:
            "table and figure of the ablation {params.name}\nlog: {log}"
        shell:
            "tailrl job ablation --study {params.study:q} --name {params.name:q} --results {params.results:q} "
            "--out {params.results:q} 2> {log:q}"


rule ablations:
    input:
        expand(f"{results}/ablations/{{ablation}}.md", ablation=study.ablations),
    localrule: True
