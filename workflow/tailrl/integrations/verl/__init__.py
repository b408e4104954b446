"""DVP and a token log for verl, asked for by `trainer.v1.trainer_mode=tailrl` (docs/how-to/verl.md).

verl finds `plugin` by the entry point `verl.plugins`. This package can be imported without verl.

    plugin   registers the trainers once verl has its own; changes nothing else
    trainer  verl's trainers with the plugin's steps in them: what each step logs and masks
    checks   settings of verl under which the plugin would not do what it says
    workers  what is changed within verl's own processes, by a call that fails loudly where it cannot be made
    scores   constrained log-probs of logits
    log      a batch as rows of the plain schema, and files of them
    older    the token log of verl's older trainer (trainer.use_v1=false)
"""
