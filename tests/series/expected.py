"""Which of Debian's patches are refused, and why; all others must come out as git has them.

A patch that needs a refused one is refused in its wake: its context is not in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is known of one version of a package.

    Attributes:
        version: Debian's.
        count: patches in the series; several mails in one file are several patches.
        reasons: part of the reason -> files that are refused for it, each with the number of
            the mail where it has several.
        git: those of them that ``git apply`` takes: it passes over text, takes the nearest of
            two places, or doesn't look at messages.
    """

    version: str
    count: int
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    git: tuple[str, ...] = ()

    @property
    def refused(self) -> dict[str, str]:
        """File -> part of the reason."""
        return {file: reason for reason, files in self.reasons.items() for file in files}


EXPECTED: dict[str, Expected] = {
    "linux": Expected(
        version="6.1.176-1",
        count=165,
        reasons={
            "ambiguous: the context fits at lines": (
                "bugfix/x86/perf-tools-fix-unwind-build-on-i386.patch",
            ),
            "the change may be there already": (
                "bugfix/arm64/arm64-dts-rockchip-fix-spdif-fe460000-ordering-on-rk.patch",
            ),
        },
        git=(
            "bugfix/arm64/arm64-dts-rockchip-fix-spdif-fe460000-ordering-on-rk.patch",
            "bugfix/x86/perf-tools-fix-unwind-build-on-i386.patch",
        ),
    ),
    "grub2": Expected(
        version="2.06-13+deb12u2",
        count=206,
        reasons={
            "'+++' names another one": ("gcc12_build_dangling_pointer.patch",),
        },
    ),
    "imagemagick": Expected(
        version="8:6.9.11.60+dfsg-1.6+deb12u11",
        count=193,
    ),
    "glibc": Expected(
        version="2.36-9+deb12u14",
        count=109,
        reasons={
            "binary diff without content": ("git-updates.diff",),
            "is longer than its header counts": ("hurd-i386/tg-sysvshm.diff",),
            "is not in the file": (
                "arm64/local-revert-aarch64-check-kernel-version-for-sve-ifuncs.diff",
                "arm64/local-revert-aarch64-use-prefer_sve_ifuncs-for-sve-memset.diff",
                "kfreebsd/submitted-auxv.diff",
            ),
            "text that is no part of a diff": (
                "any/git-floatn-gcc-13-support.diff",
                "hurd-i386/tg-thread-cancel.diff",
            ),
            "the change is there already": ("any/local-disable-tst-bz29951.diff",),
            "the file is already what the patch makes of it": (
                "amd64/local-revert-x86-64-add-GLIBC_ABI_DT_X86_64_PLT-version.diff",
            ),
        },
        git=(
            "any/git-floatn-gcc-13-support.diff",
            "hurd-i386/tg-sysvshm.diff",
            "hurd-i386/tg-thread-cancel.diff",
        ),
    ),
    "python3.11": Expected(
        version="3.11.2-6+deb12u8",
        count=83,
        reasons={
            "the text is not utf-8": ("CVE-2023-6597.patch",),
        },
        git=("CVE-2023-6597.patch",),
    ),
    "qemu": Expected(
        version="1:7.2+dfsg-7+deb12u18",
        count=40,
        reasons={
            "binary diff without content": (
                "v7.2.10.diff",
                "v7.2.16.diff",
            ),
            "is not in the file": (
                "openbios-spelling-endianess.patch",
                "skip-meson-pc-bios.diff",
                "slof-spelling-seperator.patch",
                "spelling.diff#1",
                "spelling.diff#2",
                "v7.2.11.diff",
                "v7.2.12.diff",
                "v7.2.14.diff",
                "v7.2.15.diff",
                "v7.2.17.diff",
                "v7.2.18.diff",
                "v7.2.19.diff",
                "v7.2.20.diff",
                "v7.2.21.diff",
                "v7.2.22.diff",
            ),
            "text that is no part of a diff": ("v7.2.13.diff",),
        },
    ),
    "edk2": Expected(
        version="2022.11-6+deb12u2",
        count=34,
    ),
    "vim": Expected(
        version="2:9.0.1378-2+deb12u2",
        count=14,
    ),
    "dovecot": Expected(
        version="1:2.3.19.1+dfsg1-2.1+deb12u6",
        count=54,
    ),
    "curl": Expected(
        version="7.88.1-10+deb12u15",
        count=51,
        reasons={
            "would split the mail": (
                "build-Divide-mit-krb5-gssapi-link-flags-between-LDFLAGS-a.patch",
            ),
        },
        git=("build-Divide-mit-krb5-gssapi-link-flags-between-LDFLAGS-a.patch",),
    ),
    "systemd": Expected(
        version="252.39-1~deb12u2",
        count=29,
    ),
    "bash": Expected(
        version="5.2.15-2",
        count=19,
    ),
}
