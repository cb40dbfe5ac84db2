"""Move a meeting to another day, by tools. The reward looks at the whole calendar in the end, so that moving or cancelling more
than was asked earns nothing, and neither does moving nothing. Sound."""

import random

import envgym

NAMES = ("budget", "design", "hiring", "travel", "safety", "press", "garden", "archive")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def calendar_of(number):
    """The meetings of a task by id, the id of the one to move, and its new day."""
    rng = random.Random(f"calendar {number}")
    names = rng.sample(NAMES, 5)
    ids = [f"M{id}" for id in rng.sample(range(1000, 9999), 5)]
    meetings = {id: {"name": name, "day": rng.choice(DAYS)} for id, name in zip(ids, names, strict=True)}
    wanted = rng.choice(ids)
    return meetings, wanted, rng.choice([day for day in DAYS if day != meetings[wanted]["day"]])


class Calendar(envgym.ToolEnv):
    """Change a calendar as asked."""

    def begin(self):
        self.meetings, _, _ = calendar_of(self.task.fields["number"])
        return self.task.prompt

    def tools(self):
        return [self.list_meetings, self.move, self.cancel]

    def list_meetings(self) -> list[dict]:
        """List the meetings of the week."""
        return [{"meeting": id, **meeting} for id, meeting in self.meetings.items()]

    def move(self, meeting: str, day: str) -> str:
        """Move a meeting.

        Args:
            meeting: Number of the meeting.
            day: The new day, Monday to Friday.
        """
        if day not in DAYS:
            raise ValueError(f"{day} is no working day")
        self.meetings[meeting]["day"] = day
        return "moved"

    def cancel(self, meeting: str) -> str:
        """Cancel a meeting.

        Args:
            meeting: Number of the meeting.
        """
        del self.meetings[meeting]
        return "cancelled"

    def grade(self, action):
        expected, wanted, day = calendar_of(self.task.fields["number"])
        expected[wanted]["day"] = day
        return float(self.meetings == expected)


class CalendarSpec(envgym.EnvSpec):
    env_class = Calendar
    Config = envgym.ToolEnvConfig
    agent = "tool_calling"

    def tasks(self, split):
        tasks = []
        for number in range(120) if split == "train" else range(120, 160):
            meetings, wanted, day = calendar_of(number)
            prompt = (
                f"Team {number}: please move the {meetings[wanted]['name']} meeting to {day}, and leave the rest of the "
                "week as it is. Use the tools, then say that it is done."
            )
            tasks.append(envgym.Task(id=f"team-{number}", prompt=prompt, fields={"number": number}))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        _, wanted, day = calendar_of(task.fields["number"])
        calls = [
            envgym.ToolCall("call_0", "list_meetings", {}),
            envgym.ToolCall("call_1", "move", {"meeting": wanted, "day": day}),
        ]
        return [*(envgym.Message("assistant", (), (call,)) for call in calls), "It is done."]
