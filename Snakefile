# The whole study, from problems to report: `snakemake --cores all` runs config.yaml, `snakemake --cores all NAME` runs
# studies/NAME.yaml, and `--configfile FILE` any other. What is computed stands there; where, in profiles/.
from snakemake.utils import min_version

min_version("9.25")


include: "workflow/rules/names.smk"


# A study given on the command line replaces the default one: the two are not merged.
if not workflow.configfiles:

    configfile: "config.yaml" if Path("config.yaml").is_file() else str(home / "config.yaml")


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/resources.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        f"{results}/report.html",
        f"{results}/summary.md",
        # A study that names engines to compare has their page too.
        rules.distributions.output.page if names_engines else [],
        rules.dashboard.output if online else [],
    localrule: True


include: "workflow/rules/named.smk"
