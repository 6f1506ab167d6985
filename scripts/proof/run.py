"""Runs claims, each command once, and writes a JSON file for each claim as soon as its figure is there."""

import datetime
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from machine import machine
from page_parts import ROOT
from proof.claim import NOT_HERE, REPRODUCED
from proof.commands import CommandError, Tools

RECORDS = ROOT / "docs/proof/claims"
# Paths whose changes alter no figure, so that a record stays valid.
ELSEWHERE = (":!docs", ":!scripts", ":!tests/scripts", ":!*.md")


def say(text):
    print(f"==> {text}", file=sys.stderr, flush=True)


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit():
    """The last commit that changed what claims run, marked if the work tree has other changes of it."""
    last = git("log", "-1", "--format=%h", "--", ".", *ELSEWHERE)
    return last + ("-dirty" if git("status", "--porcelain", "--", ".", *ELSEWHERE) else "")


def recorded(claim, folder=None):
    """The record of a claim, or nothing."""
    path = (folder or RECORDS) / f"{claim.id}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@dataclass(frozen=True)
class Session:
    """Where records go, of which commit they are, and whether a claim that has one runs again."""

    out: Path
    commit: str
    tools: Tools
    is_quick: bool
    again: bool

    def command(self, claim):
        return claim.command.shortened() if self.is_quick else claim.command

    def is_done(self, claim):
        record = recorded(claim, self.out)
        if self.again or record is None or record["verdict"] == NOT_HERE or self.commit.endswith("-dirty"):
            return False
        of_record = record["setup"]["commit"], record["setup"]["command"]
        return of_record == (self.commit, self.command(claim).shown())

    def run(self, claims):
        """Runs what is not done, and returns what went wrong: commands without figures, and claims that no longer hold."""
        by_command = {}
        for claim in claims:
            if self.is_done(claim):
                say(f"{claim.id}: done already")
            else:
                by_command.setdefault(self.command(claim), []).append(claim)
        failures = []
        for number, (command, of_command) in enumerate(by_command.items(), 1):
            names = ", ".join(claim.id for claim in of_command)
            say(f"{names} ({number} of {len(by_command)}): {command.shown() or 'not here'}")
            failures += self.run_command(command, of_command)
        return failures

    def run_command(self, command, claims):
        if reason := command.missing(self.tools):
            for claim in claims:
                self.write(claim, self.about(claim, load=None) | {"verdict": NOT_HERE, "reason": reason})
            return []
        load, _, _ = os.getloadavg()
        try:
            output = command.output(self.tools)
        except CommandError as error:
            return [f"{claim.id}: {error}" for claim in claims]
        return [failure for claim in claims if (failure := self.judge(claim, output, load))]

    def judge(self, claim, output, load):
        """Writes the record of a claim, and returns what went wrong, if something did."""
        try:
            figure = claim.read(output)
        except (CommandError, KeyError, ValueError) as error:
            return f"{claim.id}: {type(error).__name__}: {error}"
        verdict = claim.verdict(figure)
        record = self.about(claim, load) | {
            "figure": figure.value,
            "unit": claim.unit,
            "interval": [figure.low, figure.high],
            "runs": figure.runs,
            "verdict": verdict,
        }
        before = recorded(claim)
        self.write(claim, record)
        if before and before["verdict"] == REPRODUCED != verdict:
            return f"{claim.id}: {verdict} any more: {figure.value:g} {claim.unit}, wanted {claim.rule.words}"
        return None

    def about(self, claim, load):
        """What a record says before it has a figure; `load` is that of the machine when the command began."""
        command = self.command(claim)
        setup = {
            "command": command.shown(),
            "model": command.model,
            "seed": command.seed,
            "machine": machine(),
            "load": load,
            "commit": self.commit,
            "date": datetime.date.today().isoformat(),
        }
        about = {"id": claim.id, "claim": claim.text, "by": claim.source, "setup": setup, "paper": claim.paper}
        return about | ({"rule": claim.rule.words} if claim.rule else {})

    def write(self, claim, record):
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{claim.id}.json").write_text(json.dumps(record, indent=1) + "\n")
        say(f"{claim.id}: {record['verdict']}" + (f", {record['figure']:g} {record['unit']}" if "figure" in record else ""))
