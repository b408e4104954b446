# The page over the studies that are there: it computes nothing that a study has to.


rule overview:
    input:
        claims=known_claims,
    output:
        page="results/overview/claims.md",
        lines="results/overview/statements.csv",
    log:
        "results/overview/overview.log",
    localrule: True
    conda:
        conda_env
    params:
        roots=["results", str(home / "docs/results")],
        made_for=digest_of_files([str(home / "docs/results/made_for.yaml")]),
        sources=sources(job_files("overview")),
        out=subpath(output.page, parent=True),
    message:
        "page over all studies\nlog: {log}"
    shell:
        "tailrl job overview {params.roots:q} --out {params.out:q} 2> {log:q}"
