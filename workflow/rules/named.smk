# What the names of studies stand for (names.smk).

# Studies that train nothing are about one page: these, and all that extend the shared file of flips.
PROBES = {
    "gradient_quality": rules.gradients.output.page,
    "gradient_catalogue": rules.gradients.output.page,
    "smollm2_checks": rules.distributions.output.page,
}
FLIPS = {(folder / "studies/shared/flips.yaml").resolve() for folder in (home, Path())}
if named and FLIPS.intersection(files_of(STUDIES[members[-1]])):
    PROBES[named] = rules.distributions.output.page

if named in [rule.name for rule in workflow.rules]:
    raise WorkflowError(
        f"{STUDIES[members[-1]]}: {named} is the name of a rule; give the file another name"
    )

if named:

    # A study by its name: its report, and all of its ablations.
    rule:
        name:
            named
        input:
            PROBES.get(named) or [*rules.all.input, *rules.ablations.input],
            f"{results}/across.md" if len(members) > 1 else [],
        localrule: True


if len(members) > 1:

    # The study at hand is the last of those that are compared; the others are finished.
    rule across:
        input:
            arm_results(study.arms),
            others=finished_results(members[:-1]),
            studies=[str(STUDIES[member]) for member in members],
            code=REPORT_FILES,
        output:
            page=f"{results}/across.md",
            figure=f"{results}/across.svg",
            tables=[
                f"{results}/across{ending}.csv"
                for ending in ("", "_claims", "_k3_ratios")
            ],
        log:
            f"{results}/logs/across.log",
        conda:
            conda_env
        params:
            sources=sources(REPORT_FILES),
            out=lambda wildcards, output: Path(output.page).with_suffix(""),
        message:
            "comparison of " + ", ".join(members) + "\nlog: {log}"
        shell:
            "tailrl across {input.studies:q} --results results --out {params.out:q} 2> {log:q}"


suggest(targets, [rule.name for rule in workflow.rules])
