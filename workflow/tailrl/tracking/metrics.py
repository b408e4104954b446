"""Every metric that training logs: its name and what it means. The one place that documents them."""

# π_train is the trainer before the step's first update (r_corr). With several minibatches and nothing that scores the
# rollouts before it (no clip, or bypass) a later one is scored after the updates on the ones before: what is read as
# mismatch then holds the policy's own movement too.
_LOG_RATIO = {
    "kl": "K1: mean over tokens of log π_infer − log π_train, nats",
    "k3_kl": "K3: mean over tokens of e^ℓ − ℓ − 1 with ℓ = log π_train − log π_infer, nats",
    "delta_abs_mean": "mean over tokens of |ℓ|, nats",
    "delta_abs_max": "largest |ℓ| of a token, nats",
    "rollout_is_ratio_fraction_high": "fraction of the tokens with π_train/π_infer above 2",
    "rollout_is_ratio_fraction_low": "fraction of the tokens with π_train/π_infer below 1/2",
    "training_ppl": "perplexity of a response under the trainer, mean over responses",
    "rollout_ppl": "perplexity of a response under the sampler, mean over responses",
    "ppl_ratio": "training perplexity over rollout perplexity, mean over responses",
    "log_ppl_diff": "log of that ratio, mean over responses, nats",
    "log_ppl_abs_diff": "absolute log of that ratio, mean over responses, nats",
    "chi2_token": "mean over tokens of (π_train/π_infer)² − 1",
}
_WEIGHTS = {
    "rollout_is_mean": "mean sequence weight",
    "rollout_is_std": "standard deviation of the sequence weights",
    "rollout_is_min": "smallest sequence weight",
    "rollout_is_max": "largest sequence weight",
    "rollout_is_eff_sample_size": "effective sample size as a fraction of the responses, 1 / mean(w_norm²)",
}

VERIFICATION = {
    "verification/rounds": "rounds of proposal and scoring pass until every response of the step was done",
    "verification/agreement": "fraction of the judged tokens that the engine and the trainer drew alike",
    "verification/proposed_per_kept": "tokens that the engine proposed for each token of the responses",
    "verification/seconds": "seconds in the scoring passes, a part of time/rollout",
}
"""Logged besides where the trainer verifies what the engine draws."""

METRICS: dict[str, str] = {
    "train/step": "number of the update, from 0",
    "train/loss": "the policy-gradient loss; its value says little, its gradient is the estimator",
    "train/grad_norm": "2-norm of the gradient before it is scaled down",
    "train/skipped": "1 where the update was skipped, for a NaN or Inf in log-probs, loss or gradient; else 0. What is "
    "measured in the update is null then; minibatches before the one at fault have had theirs",
    "train/learning_rate": "the optimizer's rate in this step",
    "reward/mean": "mean reward of the step's responses",
    "reward/all_right_fraction": "fraction of the prompts whose responses all earn 1 (no gradient from them)",
    "reward/all_wrong_fraction": "fraction of the prompts whose responses all earn 0 (no gradient from them)",
    "response/length_mean": "mean response length, tokens",
    "response/length_max": "longest response, tokens",
    "response/stopped_fraction": "fraction of the responses that ended by the end token",
    "policy/clip_fraction": "fraction of the tokens whose ratio is clipped (no gradient)",
    "policy/entropy": "entropy of the trainer's (constrained) distribution, mean over tokens, nats",
    **{
        f"rollout_corr/{k}": f"{v} (constrained distributions, tokens inside the trainer's set)"
        for k, v in _LOG_RATIO.items()
    },
    # The trainer gives such a response no probability: the weights' ratio is 0 too, and any other would be partial.
    "rollout_corr/chi2_seq": "mean over responses of (π_train/π_infer)² − 1 (constrained distributions); a response "
    "with a token outside the trainer's set has ratio 0",
    **{f"rollout_corr_unmasked/{k}": f"{v} (unmasked distributions, the same tokens)" for k, v in _LOG_RATIO.items()},
    "rollout_corr_unmasked/chi2_seq": "the same (unmasked distributions), tokens outside the trainer's set included",
    "rollout_corr/delta_seq_abs_mean": "mean over responses of |Σ_t ℓ| (constrained distributions), nats; those with a "
    "token outside the trainer's set are left out",
    "rollout_corr_unmasked/delta_seq_abs_mean": "the same (unmasked distributions), tokens outside the trainer's set "
    "included",
    **{f"rollout_corr_raw/{k}": f"{v}, before clipping, rejection and veto" for k, v in _WEIGHTS.items()},
    **{f"rollout_corr/{k}": f"{v}, as used in the loss" for k, v in _WEIGHTS.items()},
    "rollout_corr/c_positive_advantage": "C(r) = −(r − 1) A over the tokens with A > 0, as a mean over all tokens",
    "rollout_corr/c_negative_advantage": "C(r) over the tokens with A < 0, as a mean over all tokens",
    "rollout_corr/rollout_rs_masked_fraction": "fraction of the tokens that the correction's token threshold masks",
    "rollout_corr/rollout_rs_seq_masked_fraction": "fraction of the responses that the correction's threshold rejects",
    "rollout_corr/veto_seq_fraction": "fraction of the responses that the veto discards",
    "dvp/kept_mass_train_mean": "Z, probability mass of the trainer's safe set, mean over tokens",
    "dvp/kept_mass_train_min": "smallest Z of a token",
    "dvp/kept_mass_rollout_mean": "Z', the same in the sampler, mean over tokens",
    "dvp/kept_mass_rollout_min": "smallest Z' of a token",
    "dvp/lost_mass_per_response": "Σ_t (1 − Z_t) in the trainer, mean over responses: the bias bound of Prop. 5.5",
    "dvp/bias_bound_paper": "that bound as the paper has it, T (1 − Z_min): the longest response and the smallest Z",
    "dvp/total_variation": "1 − Π_t Z_t in the trainer, mean over responses: the chance that a response of the full "
    "policy leaves the set; times the range of the reward it is the sharpest bound of |J_mp − J|",
    "dvp/threshold": "the number of the safe set's rule (ln ρ, k or p), mean over responses",
    "dvp/kept_vocab_per_token_train": "|V_S|, size of the trainer's safe set, mean over tokens",
    "dvp/kept_vocab_per_token_rollout": "|V'_S|, the same in the sampler, mean over tokens",
    "dvp/sampled_outside_train_support_fraction": "fraction of the sampled tokens outside the trainer's safe set",
    "dvp/sampled_outside_train_support_count": "number of them",
    "dvp/outside_delta_abs_mean": "mean |ℓ| of those tokens under the unmasked distributions, nats; null without any",
    "time/rollout": "seconds in generation",
    "time/reward": "seconds in decoding and scoring the responses",
    "time/forward": "seconds in packing, forward and loss",
    "time/backward": "seconds in backward",
    "time/optimizer": "seconds in clipping and the optimizer",
    "time/weights": "seconds in handing the weights to the engine",
    "time/metrics": "seconds in the diagnostics, and in logging and saving after the step before",
    "time/step": "seconds of the whole step",
    "throughput/tokens_per_second": "response tokens per second of the whole step",
}
