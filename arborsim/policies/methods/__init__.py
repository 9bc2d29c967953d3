"""Published methods, a file each, and the words that several of them share."""


def same_as_kvpress(press: str, kept: str = "30 to 95 % of them kept", authors: bool = True) -> str:
    """`Policy.official` of a method that was compared with NVIDIA's kvpress."""
    said = "; the authors' repository in the same way, its commit was not noted" if authors else ""
    return (
        f"NVIDIA/kvpress 0.5.5: literally, 500 of 500 random prompts (16 to 199 tokens, {kept}, "
        f"two KV heads, normal vectors) hold the same tokens as after {press}{said}"
    )
