"""The words of the generated tasks, in alphabetical order."""

_LIST = """
apple arrow beach bird boat bone bread bridge brook bush cake candle castle chair cliff clock cloud coat corn crown
deer desk dove drum duck eagle farm feather fence field fire fish flag flower forest fox frog garden gate ghost glass
glove goat gold grape grass hammer hat hill honey horse house ink island jar jewel key king kite knife ladder lake
lamp leaf lemon lion loaf map meadow mill mirror moon moss mouse nail nest night oak ocean olive onion owl paper path
pearl pen piano pond queen rain ring river road rope rose sail salt sand seed sheep ship shoe silver snow song spoon
star stone storm sugar swan table tiger tower tree valley violin wagon water whale wheel window wolf wood wool
"""
WORDS = _LIST.split()
