"""The question and the tool of every agent here."""

QUESTION = "How warm is it in Oslo and in Rome?"


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return {"Oslo": "4 C and rain", "Rome": "20 C and sun"}[city]
