"""Fetches a study's inputs from the Hugging Face hub, for nodes without a network."""

from tailrl.config.policy import PretrainedPolicy
from tailrl.config.study import Study
from tailrl.model.policy import load_policy, load_tokenizer
from tailrl.model.tokenizer_trial import try_tokenizer
from tailrl.tasks.registry import download_task


def download_inputs(study: Study) -> list[str]:
    """Fetch the study's tasks and pretrained policy into the Hugging Face cache, unless they are there.

    Returns:
        The names of the data sets and the policy that the study takes from there.

    Raises:
        StudyError: the hub is out of reach.
    """
    fetched = [name for task in (study.task, study.evaluation.task) if (name := download_task(task))]
    if isinstance(study.policy, PretrainedPolicy):
        try_tokenizer(study.policy.path)
        load_tokenizer(study.policy.path)
        load_policy(study.policy.path)
        fetched.append(study.policy.path)
    return fetched
