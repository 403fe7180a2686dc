"""Whether the Hugging Face hub can be reached, found in seconds: its own packages try for a minute."""

import threading
import urllib.error
import urllib.request

_PATIENCE = 5  # seconds for the hub to answer at all


def hub_problem() -> str | None:
    """Why the hub cannot be asked, in words, found within seconds; None if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    problem = [f"{constants.ENDPOINT} does not answer"]

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_PATIENCE).close()
            problem.clear()
        except urllib.error.HTTPError:  # also an answer
            problem.clear()
        except (OSError, ValueError) as error:
            problem[0] += f" ({first_line(error)})"

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no timeout of its own
    thread.start()
    thread.join(_PATIENCE)
    return problem[0] if problem else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)
