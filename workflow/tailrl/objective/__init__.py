"""The objective: Dynamic Vocabulary Pruning (DVP, arXiv 2512.23087) and the remedies beside it, as pure functions.

DVP is four files, in reading order:

1. `safe_set.py`: the safe set V_S; the constrained policy π^mp, its kept mass Z, and the sampled tokens' log-probs.
2. `advantages.py`: rewards to advantages A (RLOO, GRPO, REINFORCE).
3. `corrections.py`: the log-ratio Δ to stop-gradient weights w (importance weights, MIS, rejection, veto).
4. `loss.py`: the estimator of Theorem 5.3 from log π^mp, A and w, or PPO's surrogate.

`kernels/` computes the same log-probs fast. `training/token_table.py` computes the bounds of Prop. 5.5.
"""
