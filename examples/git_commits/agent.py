"""Agent that commits with the tools of an MCP server: each rollout has its own repository, and the reward looks into it."""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

from rollout_server import Agent, Limits, RewardResult, Run, mcp

GIT = mcp(
    [sys.executable, "-m", "mcp_server_git"],  # the package mcp-server-git, as it is
    include=("git_status", "git_add", "git_commit", "git_log"),
    timeout=30,
)


class GitCommits(Agent):
    """Commits files as it is told."""

    name = "git-commits"
    tools = (GIT,)
    limits = Limits(turns=8, seconds=120)

    def setup(self, run: Run) -> None:
        """Make a repository with the files of the row, none of them committed, and tell the model where it is."""
        folder = run.state["folder"] = mkdtemp(prefix="repository-")
        for name, text in run.metadata["files"].items():
            (Path(folder) / name).write_text(text)
        git(folder, "init", "--quiet")
        git(folder, "config", "user.name", "Model")
        git(folder, "config", "user.email", "model@example.com")
        run.wait(run.append({"role": "user", "content": f"The repository is {folder}."}))

    def reward(self, run: Run) -> RewardResult:
        """Return 1.0 if the history is exactly the ground truth, the oldest commit first: message and files."""
        log = git(run.state["folder"], "log", "--reverse", "--name-only", "--format=%x00%s").split("\0")[1:]
        commits = [[message, sorted(filter(None, files))] for message, *files in map(str.splitlines, log)]
        return RewardResult(
            reward=float(commits == run.metadata["ground_truth"]), scores={"commits": float(len(commits))}
        )

    def cleanup(self, run: Run) -> None:
        """Delete the repository."""
        shutil.rmtree(run.state["folder"], ignore_errors=True)


def git(folder: str, *arguments: str) -> str:
    """Run git in a folder and return what it prints; nothing if it fails, as `log` does without a commit."""
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False).stdout
