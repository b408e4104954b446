"""What a study needs from the Hugging Face hub, fetched beforehand for nodes without a network."""

from tailrl.config.policy import PretrainedPolicy
from tailrl.config.study import Study
from tailrl.model.policy import load_policy, load_tokenizer
from tailrl.tasks.registry import download_task


def download_inputs(study: Study) -> None:
    """Fetches into the Hugging Face cache what the study needs from the hub; raises StudyError out of reach."""
    for task in (study.task, study.evaluation.task):
        download_task(task)
    if isinstance(study.policy, PretrainedPolicy):
        load_tokenizer(study.policy.path)
        load_policy(study.policy.path)
