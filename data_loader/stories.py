"""Little stories that the program writes: a text for language models without files or network.

A story is consistent: who loses what, and where; who knows it; what is found at the end. So a model
can learn spelling, grammar, agreement and coherence over some hundred characters.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

from data_loader.base import Data, Tokenizer
from data_loader.loader import random_stream
from data_loader.text import Corpus, Document, Given, corpus_of, prepared, text_data
from data_loader.tokenizers.plain import characters
from utils.forms import Count, CountOrZero, Fraction, checked

Option = TypeVar("Option")

VERSION = 1  # part of the cache's key: increase it with every change to a story


def listed(words: str) -> list[str]:
    return words.split(", ")


SHE, HE = ("she", "her", "her"), ("he", "him", "his")
WOMEN = listed("Anna, Clara, Edith, Grace, Ida, Lucy, Mara, Nora, Olga, Ruth")
MEN = listed("Ben, Carl, David, Emil, Hugo, Jonas, Karl, Leo, Oscar, Tom")
PEOPLE = [(name, SHE) for name in WOMEN] + [(name, HE) for name in MEN]
WORK = listed("baker, carpenter, farmer, fisher, gardener, miller, painter, shepherd, tailor")
PLACES = listed(
    "at the mill, behind the church, by the lake, in the barn, in the forest, in the garden, "
    "in the old tower, near the harbour, on the hill, under the bridge, at the market, by the well"
)
THINGS = listed(
    "bell, book, candle, coat, drum, flute, hat, kite, lamp, letter, mirror, ring, rope"
)
KINDS = listed("blue, broken, golden, green, heavy, little, old, red, round, silver, small, white")
BEASTS = listed("cat cats, dog dogs, fox foxes, goat goats, goose geese, hen hens, horse horses")
BEASTS += listed("mouse mice, owl owls, sheep sheep")
NUMBERS = listed("one, two, three, four, five, six")
WHEN = listed("One morning, One evening, One day in spring, One day in winter, On a rainy day")
SKY = listed("The sun shone, The wind blew, It was very quiet, Snow lay everywhere, It rained")
GIFTS = listed("an apple, a cake, a loaf of bread, a pot of honey, some cheese, warm soup")
HOURS = listed("an hour, two hours, three hours, half a day")

BEGIN = (
    "{when}, {hero} the {work} went out with {his} {thing}. {sky}, and {he} was happy.",
    "{hero} was a {work}, and {he} lived {home}. {when}, {he} took {his} {thing} for a walk.",
    "There was once a {work} called {hero}. {He} had {a_thing}, and {he} loved it very much.",
    "{when}, {hero} the {work} looked for {his} {thing}. {sky}, but {he} did not see it.",
)
LOSE = (
    "But {home}, {he} lost the {thing}, and {he} did not know where it was.",
    "Then {he} fell asleep {home}, and when {he} woke up, the {thing} was gone.",
    "But soon the {thing} was nowhere to be seen, and {hero} began to cry.",
    "A storm came, and the {thing} flew out of {his} hands and away.",
)
MEET = (
    "{He} met {number} {beasts}. {Number} {beasts} {were} sitting {home}, and {they} looked at "
    "{him}.",
    "{number_of} {were} there, but {they} only looked at {him} and said nothing.",
    "{He} asked the {beasts} {home}, but {they} did not know anything about {a_thing}.",
)
ASK = (
    '"{friend}, have you seen my {thing}?" asked {hero}.',
    '"Dear {friend}," said {hero}, "I have lost my {thing}. Can you help me?"',
    'So {hero} went to see {friend}. "Where is my {thing}?" {he} asked.',
    "{Hero_} friend {friend} heard it and came at once.",
)
TELL = (
    '"Yes," said {friend}, "I saw {a_thing} {there}. Let us go and look!"',
    '"Do not cry, {hero}," {friend} answered. "I know who has it. We must look {there}."',
    '{friend} thought for a while. "Something {kind} was lying {there}," {f_he} said.',
    '"I have not seen it," said {friend}, "but the {beast} told me about {a_thing} {there}."',
)
GO = (
    "They walked for {hours}, and {friend} sang a song that {f_his} mother had taught {f_him}.",
    "{hero} and {friend} took some bread and went on their way. It took them {hours}.",
    "So they went together. {hero} carried the bread, and {friend} carried the water.",
    "It was a long way. After {hours}, {hero} was tired, but {friend} was not.",
)
FIND = (
    "And really, {there} they found the {thing}!",
    "{There}, {hero} saw it first: the {thing} was hanging on a tree.",
    "The {thing} was {there}, and the {beast} was sleeping beside it.",
    "{There} lay the {thing}, and {number} {beasts} {were} sitting beside it.",
)
END = (
    '"Thank you, {friend}," said {hero}, and {he} gave {f_him} {gift}. From that day on, the '
    "{work} never lost {his} {thing} again.",
    "{hero} took {his} {thing} home, and {friend} came too. They ate {gift} and laughed.",
    '"Now I will take better care of it," said the {work}. And {he} did.',
    "{hero} was so glad that {he} danced. {friend} danced with {him} until it was dark.",
)
SCENES = (BEGIN, LOSE, MEET, ASK, TELL, GO, FIND, END)


@checked
def stories(
    seed: CountOrZero = 0,
    count: Count = 1800,
    length: Count = 256,
    tokenizer: Tokenizer | None = None,
    val_size: Fraction = 0.1,
    documents: Literal["joined", "apart"] = "joined",
) -> Data:
    """Windows of `length` tokens from little stories, written from a seed; 1800 of them are 1 MB.
    The default tokenizer is `characters`."""

    def corpus() -> Corpus:
        return corpus_of("stories", [Given(written(seed, count))], {"val": val_size}, seed)

    made = prepared("stories", [VERSION, seed, count, val_size], corpus, tokenizer or characters())
    return text_data(made, dict.fromkeys(made.tokens, "stories"), length, documents)


def written(seed: int, count: int) -> list[Document]:
    """The stories, as documents."""
    random = random_stream(seed, 0)
    return [
        Document(story(row) + "\n", f"story {i}")
        for i, row in enumerate(random.random((count, 40)))
    ]


def story(numbers: np.ndarray) -> str:
    """One story, chosen by numbers in [0, 1)."""
    chosen = iter(numbers.tolist())

    def choose(options: Sequence[Option]) -> Option:
        return options[int(next(chosen) * len(options))]

    def choose_two(options: Sequence[Option]) -> tuple[Option, Option]:
        first = choose(options)
        return first, choose([option for option in options if option != first])

    (hero, (he, him, his)), (friend, (f_he, f_him, f_his)) = choose_two(PEOPLE)
    (home, there), kind = choose_two(PLACES), choose(KINDS)
    (beast, herd), number = choose(BEASTS).split(), choose(NUMBERS)
    one = number == "one"
    herd = beast if one else herd
    thing = f"{kind} {choose(THINGS)}"
    words = {
        "hero": hero, "he": he, "him": him, "his": his, "He": he.capitalize(),
        "Hero_": f"{hero}'s", "friend": friend, "f_he": f_he, "f_him": f_him, "f_his": f_his,
        "home": home, "there": there, "There": there[0].upper() + there[1:], "kind": kind,
        "thing": thing, "a_thing": f"{'an' if kind[0] == 'o' else 'a'} {thing}",
        "beast": beast, "beasts": herd, "number": number,
        "Number": "The" if one else f"All {number}", "were": "was" if one else "were",
        "number_of": f"{number.capitalize()} {herd}", "they": "it" if one else "they",
        "work": choose(WORK), "when": choose(WHEN),
        "sky": choose(SKY), "gift": choose(GIFTS),
        "hours": choose(HOURS),
    }  # fmt: skip
    text = []
    for scene in SCENES:
        text.append(choose(scene).format_map(words))
        text.append("\n" if scene in (MEET, TELL, FIND) else " ")
    return "".join(text[:-1])
