"""Writes lab/dps_lab/data/sessions.jsonl: 24 synthetic tool-use sessions, for machines that cannot download BFCL.

python -m dps_tools.make_sessions

The output is deterministic.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from dps_lab.workload.assets import bundled_sessions
from dps_lab.workload.sessions import Message, Session, Turn, dump_sessions

SESSIONS_PER_SCENARIO = 6
CITIES = [
    "Lisbon",
    "Kraków",
    "São Paulo",
    "Osaka",
    "Tromsø",
    "Nairobi",
    "Valparaíso",
    "Zürich",
    "Hà Nội",
    "Leeds",
]
SERVICES = ["checkout", "search", "billing", "inventory", "notifications", "identity", "pricing", "shipping"]
PEOPLE = ["Amara", "Bjørn", "Chen", "Dilnoza", "Elif", "Farid", "Greta", "Hiro", "Inés", "Jomo"]

Step = tuple[str, str, dict[str, Any], Any, str]
"""The user's message, the name and arguments of the call, its result, and the answer."""


def function(name: str, description: str, **properties: str) -> dict[str, Any]:
    """A tool whose parameters are all required strings or numbers: name="type: description"."""
    schema = {}
    for key, text in properties.items():
        kind, _, meaning = text.partition(": ")
        schema[key] = {"type": kind, "description": meaning}
    parameters = {"type": "object", "properties": schema, "required": list(schema)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def travel(rng: random.Random) -> Iterator[Step]:
    origin, target = rng.sample(CITIES, 2)
    day = f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    flights = [
        {
            "flight": f"DP{rng.randint(100, 999)}",
            "departs": f"{day}T{rng.randint(5, 22):02d}:{rng.choice(['05', '20', '45'])}",
            "minutes": rng.randint(70, 700),
            "stops": rng.randint(0, 2),
            "seats": rng.randint(1, 90),
        }
        for _ in range(rng.randint(2, 9))
    ]
    fare, best = min((rng.randint(60, 900), flight["flight"]) for flight in flights)
    yield (
        f"I need to be in {target} on {day}. What leaves {origin} that day?",
        "search_flights",
        {"origin": origin, "destination": target, "date": day},
        flights,
        f"There are {len(flights)} connections; {best} is the cheapest at {fare} EUR.",
    )
    yield (
        "Take that one, and tell me my reference.",
        "book_flight",
        {"flight": best, "date": day},
        {"reference": f"R{rng.randint(10**5, 10**6)}", "status": "confirmed"},
        "It is booked and confirmed.",
    )
    yield (
        "Will I need an umbrella?",
        "weather",
        {"city": target, "date": day},
        {
            "chance_of_rain": rng.random().__round__(2),
            "high": rng.randint(-5, 34),
            "wind_kmh": rng.randint(0, 60),
        },
        "Take one along, it weighs next to nothing.",
    )
    yield (
        f"Find hotels in {target} that allow a late arrival, with what guests say about them.",
        "search_hotels",
        {"city": target, "date": day},
        [
            {
                "name": f"{rng.choice(['Harbour', 'Station', 'Garden'])} {rng.choice(['House', 'Inn'])}",
                "rate": rng.randint(45, 320),
                "late_arrival": rng.random() < 0.7,
                "review": rng.choice(
                    [
                        "Quiet rooms, thin walls towards the yard, a breakfast that is worth getting up for.",
                        "The night desk was friendly even at two in the morning. The lift is slow.",
                        "Close to everything. Ask for a room on an upper floor, the street is loud.",
                    ]
                ),
            }
            for _ in range(rng.randint(3, 12))
        ],
        "I would take the first one with a night desk. Shall I book it?",
    )


def incident(rng: random.Random) -> Iterator[Step]:
    service = rng.choice(SERVICES)
    region = rng.choice(["eu-north", "us-west", "ap-south"])
    yield (
        f"{service} has been slow since this morning in {region}. Show me the latency.",
        "query_metrics",
        {"service": service, "metric": "latency_p95_seconds", "region": region},
        {"points": [[f"{hour:02d}:00", rng.random().__round__(3)] for hour in range(rng.randint(6, 22))]},
        "The 95th percentile has doubled since eight o'clock.",
    )
    yield (
        "What do its logs say?",
        "read_logs",
        {"service": service, "lines": (lines := rng.randint(5, 40))},
        "\n".join(
            f"2026-11-{rng.randint(1, 28):02d}T08:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}Z "
            f"{rng.choice(['WARN', 'ERROR', 'INFO'])} {service}[{rng.randint(100, 999)}] "
            f"{rng.choice(['pool exhausted, waited', 'timed out after', 'slow query took', 'retry in'])} "
            f"{rng.randint(10, 9000)} ms request={rng.getrandbits(48):012x}"
            for _ in range(lines)
        ),
        "Most of the errors are about an exhausted connection pool.",
    )
    yield (
        "Who is on call?",
        "on_call",
        {"service": service},
        {"primary": rng.choice(PEOPLE), "secondary": rng.choice(PEOPLE)},
        "I have the names. Do you want me to page them?",
    )
    yield (
        "Yes, page the first, and write up what we know.",
        "page",
        {"service": service, "message": f"{service} slow in {region}: connection pool exhausted"},
        {"paged": True},
        f"Paged. Summary: {service} in {region} is slow because its connection pool runs dry under load.",
    )
    yield (
        "Raise the pool to 64 and restart one instance.",
        "restart",
        {"service": service, "instances": 1, "pool_size": 64},
        {"restarted": [f"{service}-{rng.randint(0, 9)}"]},
        "Done. I will look at the latency again in five minutes.",
    )


def code(rng: random.Random) -> Iterator[Step]:
    name = rng.choice(["ledger", "parser", "scheduler", "cache", "router", "codec"])
    body = "\n".join(
        f"    def step_{index}(self, value: int) -> int:\n"
        f'        """Adds {index} when the value is {rng.choice(["odd", "even", "positive"])}."""\n'
        f"        return value + {index} if value % {rng.randint(2, 9)} else self.step_{index // 2}(0)\n"
        for index in range(rng.randint(2, 18))
    )
    yield (
        f"Open {name}.py and tell me what it does.",
        "read_file",
        {"path": f"src/{name}.py"},
        f"class {name.title()}:\n{body}",
        f"It defines {name.title()}, a chain of small steps, each of which falls back to the one before.",
    )
    yield (
        "Are there tests?",
        "list_files",
        {"path": "tests"},
        [f"tests/test_{name}.py", "tests/conftest.py"],
        f"Yes, tests/test_{name}.py.",
    )
    yield (
        "Run them.",
        "run",
        {"command": f"pytest -q tests/test_{name}.py"},
        f"{rng.randint(3, 40)} passed in {rng.random():.2f}s",
        "All of them pass.",
    )
    yield (
        "Now make step_0 reject negative numbers, and add a test for it. 🙂",
        "apply_patch",
        {
            "path": f"src/{name}.py",
            "patch": "@@ def step_0(self, value: int) -> int:\n+        if value < 0:\n"
            "+            raise ValueError('value must not be negative')\n",
        },
        "applied",
        "step_0 raises ValueError for negative numbers now, and a test holds it to that.",
    )
    yield (
        "Thanks. Commit it.",
        "run",
        {"command": "git commit -am 'Reject negative values'"},
        "1 file changed",
        "Committed.",
    )


def shop(rng: random.Random) -> Iterator[Step]:
    order = f"A-{rng.randint(10**4, 10**5)}"
    items = [
        {
            "sku": f"K{rng.randint(100, 999)}",
            "name": rng.choice(["lamp", "desk", "chair", "shelf", "rug"]),
            "quantity": rng.randint(1, 4),
        }
        for _ in range(rng.randint(1, 10))
    ]
    yield (
        f"Where is my order {order}?",
        "get_order",
        {"order": order},
        {"order": order, "status": rng.choice(["packed", "shipped", "delayed"]), "items": items},
        "It is on its way.",
    )
    yield (
        "When will it arrive?",
        "track",
        {"order": order},
        {"carrier": "Northpost", "days": rng.randint(1, 9)},
        "Within the week, says the carrier.",
    )
    yield (
        "I would like to send one thing back. What are the rules?",
        "search_help",
        {"query": "returns"},
        {
            "article": "Returns",
            "text": " ".join(
                rng.sample(
                    [
                        "You can return anything within thirty days of its delivery.",
                        "Keep the packaging if you can; a plain box of the right size will do as well.",
                        "Furniture is collected from your door, small things go to any parcel shop.",
                        "The refund is paid the way you paid, five working days after the return arrives.",
                        "Made-to-measure goods cannot be returned unless something is wrong with them.",
                        "Gift receipts are refunded as vouchers.",
                        "If an item arrived damaged, send us a photograph and keep it until we answer.",
                    ],
                    rng.randint(2, 7),
                )
            ),
        },
        "You have thirty days, and larger things are collected from your door.",
    )
    yield (
        f"Good. Return the {items[0]['name']}.",
        "create_return",
        {"order": order, "sku": items[0]["sku"]},
        {"label": f"L{rng.randint(10**6, 10**7)}"},
        "The return is registered; the label is in your inbox.",
    )


SCENARIOS: dict[str, tuple[str, Callable[[random.Random], Iterator[Step]], list[dict[str, Any]]]] = {
    "travel": (
        "You plan journeys. Use the functions; do not invent connections, prices or places.",
        travel,
        [
            function(
                "search_flights",
                "Flights between two cities on a day.",
                origin="string: city",
                destination="string: city",
                date="string: ISO date",
            ),
            function(
                "book_flight",
                "Books a seat on a flight.",
                flight="string: flight number",
                date="string: ISO date",
            ),
            function(
                "weather", "The forecast for a city and a day.", city="string: city", date="string: ISO date"
            ),
            function(
                "search_hotels",
                "Hotels with rates and a review each.",
                city="string: city",
                date="string: night of arrival",
            ),
        ],
    ),
    "incident": (
        "You help engineers on call. Be brief. Change nothing that they did not ask you to change.",
        incident,
        [
            function(
                "query_metrics",
                "A metric of a service over the day.",
                service="string: service",
                metric="string: metric",
                region="string: region",
            ),
            function(
                "read_logs",
                "The last lines of a service's log.",
                service="string: service",
                lines="integer: how many",
            ),
            function("on_call", "Who is on call for a service.", service="string: service"),
            function(
                "page", "Pages the person on call.", service="string: service", message="string: what to say"
            ),
            function(
                "restart",
                "Restarts instances of a service.",
                service="string: service",
                instances="integer: how many",
                pool_size="integer: connections",
            ),
        ],
    ),
    "code": (
        "You are a careful programmer who works in the user's repository.",
        code,
        [
            function("read_file", "The content of a file.", path="string: path in the repository"),
            function("list_files", "The files of a folder.", path="string: path in the repository"),
            function("apply_patch", "Applies a unified diff.", path="string: file", patch="string: the diff"),
            function("run", "Runs a command in a sandbox.", command="string: shell command"),
        ],
    ),
    "shop": (
        "You answer customers of a furniture shop, kindly and to the point.",
        shop,
        [
            function("get_order", "An order with its items.", order="string: order number"),
            function("track", "Where a parcel is.", order="string: order number"),
            function("search_help", "Articles of the help pages.", query="string: words to look for"),
            function(
                "create_return",
                "Registers a return and makes its label.",
                order="string: order number",
                sku="string: item",
            ),
        ],
    ),
}


def session(scenario: str, number: int) -> Session:
    """A session of a scenario: for every step, a turn that calls a function and a turn that reports the result."""
    rng = random.Random(f"{scenario} {number}")
    system, script, tools = SCENARIOS[scenario]
    turns: list[Turn] = []
    for index, (ask, name, arguments, result, reply) in enumerate(script(rng)):
        call = {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        answer: Message = {"role": "tool", "tool_call_id": call["id"], "content": content}
        turns += [
            Turn(
                messages=[{"role": "user", "content": ask}],
                answer={"role": "assistant", "content": None, "tool_calls": [call]},
            ),
            Turn(messages=[answer], answer={"role": "assistant", "content": reply}),
        ]
    return Session(id=f"sample_{scenario}_{number}", tools=tools, system=system, turns=turns)


if __name__ == "__main__":
    sessions = [
        session(scenario, number) for number in range(SESSIONS_PER_SCENARIO) for scenario in SCENARIOS
    ]
    bundled_sessions().write_text(dump_sessions(sessions), encoding="utf-8")
