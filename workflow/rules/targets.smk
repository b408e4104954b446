# What can be asked for by name besides `all`: each stands for files of the study, or of all its parts.


rule gradients:
    input:
        in_each("gradients/gradient_quality.md"),
    localrule: True


rule distributions:
    input:
        in_each("distributions/distributions.html"),
    localrule: True


rule equal_mass:
    input:
        in_each("distributions/equal_mass.csv"),
    localrule: True


if has_snapshots:

    rule figure1:
        input:
            in_each("figures/figure1.svg"),
        localrule: True


rule ablations:
    input:
        ablation_pages(),
    localrule: True


for name in dict.fromkeys(
    name for study in studies.values() for name in study.ablations
):

    rule:
        name:
            f"ablation_{name}"
        input:
            ablation_pages(name),
        localrule: True


for arm in dict.fromkeys(arm for study in studies.values() for arm in study.arms):

    rule:
        name:
            f"train_{arm}"
        input:
            [
                file
                for study, settings in studies.items()
                if arm in settings.arms
                for file in run_files(study, [arm], "metrics.jsonl")
            ],
        localrule: True


for part in whole.parts:

    rule:
        name:
            f"part_{part}"
        input:
            pages_of(f"{whole.name}/{part}"),
        localrule: True


if whole.pooled:

    rule pooled:
        input:
            f"results/{whole.name}/pooled/pooled.md",
        localrule: True

    rule finished:
        input:
            f"results/{whole.name}/finished/pooled.md",
        localrule: True
