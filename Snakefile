# `snakemake --cores all` computes config.yaml, and `snakemake --cores all --configfile studies/NAME.yaml` another study. What
# is computed stands there; where, in profiles/.
include: "workflow/Snakefile"


rule study:
    default_target: True
    input:
        rules.all.input,
    localrule: True
