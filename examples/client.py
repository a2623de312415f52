"""Ask the server of serve.sh and print the answer as it comes: `python examples/client.py "a question" [URL]`."""

from __future__ import annotations

import sys

from openai import APIConnectionError, OpenAI


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=url, api_key="none")
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(
            f"Nothing answers at {url}: start examples/serve.sh and wait for its line 'Application startup complete'."
        )
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, stream=True
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
