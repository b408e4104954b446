"""More weights of a sequence, one module each, which studies find by its name (`correction: {sequence: NAME}`).

A module has `weigh(delta_T, sequence_T, count, threshold) -> Judged`, like the functions in
`tailrl.objective.corrections`. If its name begins with `reject_`, its weights are 0 or 1; else they are ratios. An
added module changes no source file of other runs.
"""
