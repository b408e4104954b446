# What can be said of the arms without training them: their gradient estimators against the exact gradient.


rule gradients:
    input:
        code=source_files("tailrl.gradients.quality"),
    output:
        qualities=f"{results}/gradients/quality.jsonl",
        run=f"{results}/gradients/run.json",
    log:
        f"{results}/logs/gradients.log",
    benchmark:
        f"{results}/benchmarks/gradients.jsonl"
    conda:
        conda_env
    threads: 1
    params:
        settings=study.gradients().model_dump_json(),
        out=subpath(output.qualities, parent=True),
    message:
        "gradient estimators on tiny models"
    shell:
        "tailrl gradients --settings {params.settings:q} --out {params.out:q} 2> {log:q}"


rule gradient_quality:
    input:
        qualities=rules.gradients.output.qualities,
        run=rules.gradients.output.run,
        code=source_files("tailrl.report"),
    output:
        table=f"{results}/gradients/gradient_quality.csv",
        page=f"{results}/gradients/gradient_quality.md",
        figure=f"{results}/gradients/gradient_quality.svg",
    log:
        f"{results}/logs/gradient_quality.log",
    conda:
        conda_env
    params:
        results=subpath(input.qualities, parent=True),
        out=subpath(output.table, parent=True),
    message:
        "table and figure of the gradient estimators"
    shell:
        "tailrl gradient_report --results {params.results:q} --out {params.out:q} 2> {log:q}"
