"""The Hugging Face hub: where it is out of reach, its libraries are told to look into their cache alone."""

ANSWER_SECONDS = 10
"""Seconds that the hub may take to answer."""


def use_cache_without_hub() -> None:
    """Asks the hub once; if nothing answers, the libraries count as offline, and save 47 s of retries for each file."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
        except Exception:  # of the HTTP library, which changes from version to version
            constants.HF_HUB_OFFLINE = True
