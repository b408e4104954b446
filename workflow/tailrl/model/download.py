"""Fetches a study's inputs from the Hugging Face hub, for nodes without a network."""

from tailrl.config.policy import PretrainedPolicy
from tailrl.config.study import Study
from tailrl.model.policy import load_policy, load_tokenizer
from tailrl.model.tokenizer_trial import try_tokenizer
from tailrl.tasks.registry import download_task


def download_inputs(study: Study) -> None:
    """Fetch the study's tasks and pretrained policy into the Hugging Face cache; raises StudyError without the hub."""
    for task in (study.task, study.evaluation.task):
        download_task(task)
    if isinstance(study.policy, PretrainedPolicy):
        try_tokenizer(study.policy.path)
        load_tokenizer(study.policy.path)
        load_policy(study.policy.path)
