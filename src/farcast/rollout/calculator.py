"""`calculator`: arithmetic with a tool, the example of an environment of several turns.

    question     What is 37 * 91 - 5? <calc>an expression</calc> computes, ...
    model        <calc>37 * 91 - 5</calc>          a tool call
    observation  3362
    model        <answer>3362</answer>             reward 1, parts {"exact": 1, "calls": 1}

The tool reads integers, + - * // %, and brackets. It is a parser of its own: what a model writes
is never run.
"""

import ast
import operator
import random
import re
from collections.abc import Callable

from farcast.errors import ConfigError
from farcast.rollout.environment import Reply, Score, Task

MAX_EXPRESSION = 120
"""Characters: what is written so cannot grow beyond 400 bits, since there are no powers."""

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HOW = "<calc>an expression</calc> computes, <answer>a number</answer> ends."
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of an expression, or what is wrong with it."""
    try:
        if len(expression) > MAX_EXPRESSION:
            raise ValueError("it is too long")
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError):
        return "error: only integers, + - * // % and brackets are read"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("it has something else in it")


class Calculator:
    """Sums of products of two numbers with `digits` digits. Reward 1 for the right answer, 0
    otherwise; an episode that is cut has given none."""

    name = "calculator"

    def __init__(self, *, digits: int = 2) -> None:
        if not 1 <= digits <= 12:
            raise ConfigError(
                "The calculator task takes `digits` from 1 to 12; correct its params."
            )
        self._digits = digits

    def task(self, seed: int) -> Task:
        draw = random.Random(seed)
        low, high = 10 ** (self._digits - 1), 10**self._digits - 1
        a, b, c = (draw.randint(low, high) for _ in range(3))
        sum_ = f"{a} * {b} {draw.choice('+-')} {c}"
        return Task(question=f"What is {sum_}? {_HOW}", answer=calculate(sum_))

    def begin(self, task: Task) -> "Sum":
        return Sum(task.answer)


class Sum:
    """One episode: any number of calls, then an answer."""

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._calls = 0

    def reply(self, text: str) -> Reply:
        answers = _ANSWER.findall(text)
        if answers:
            right = float(answers[-1].strip() == self._answer)
            return Reply(score=Score(reward=right, parts={"exact": right, "calls": self._calls}))
        calls = _CALL.findall(text)
        if not calls:
            return Reply(text=_HOW, role="feedback", feedback="neither a call nor an answer")
        self._calls += 1
        return Reply(text=calculate(calls[-1]), called=True)

    def cut(self) -> Score:
        return Score(reward=0.0, parts={"exact": 0.0, "calls": self._calls})
