"""Recipes that are small, and would be huge, endless or too deep once they were read."""

BOMBS = {
    "aliases": "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "merges": "m0: &m0 {k: 1}\n"
    + "".join(f"m{i}: &m{i}\n  <<: [{', '.join([f'*m{i - 1}'] * 30)}]\n" for i in range(1, 7)),
    "flow": "a: " + "[" * 50_000,
    "blocks": "\n".join(" " * i + "a:" for i in range(1_000)),
    "digits": "a: " + "9" * 5_000,
    "itself": "a: &a [*a]",
}
