"""What looks like a secret."""

from __future__ import annotations

import base64

A9 = "Ab3dEf6hIj9l"

PEM = "-----BEGIN {0}-----\nMIIEpAIBAAKCAQEA\n7+abc/def==\n-----END {0}-----"

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"

TOKENS = [
    ("aws-access-key-id", "AKIAIOSFODNN7EXAMPLE"),
    ("aws-access-key-id", "ASIAIOSFODNN7EXAMPLE"),
    *(("github-token", prefix + A9 * 3) for prefix in ("ghp_", "gho_", "ghs_", "ghu_", "ghr_")),
    ("github-token", "github_pat_" + A9 + "_" + A9 * 4),
    ("gitlab-token", "glpat-" + A9 + "-_" + A9),
    ("openai-key", "sk-" + A9 * 4),
    ("openai-key", "sk-proj-" + A9 * 4 + "-_" + A9),
    ("anthropic-key", "sk-ant-api03-" + A9 * 7 + "-AA"),
    *(("slack-token", f"xox{kind}-1234567890-{A9}") for kind in "abeoprs"),
    ("google-key", "AIza" + "Sy-_" + "a1B2c3D" * 4 + "xyz"),
    ("stripe-key", "sk_live_" + A9 * 2),
    ("stripe-key", "rk_live_" + A9 * 2),
    ("npm-token", "npm_" + A9 * 3),
    ("pypi-token", "pypi-AgEIcHlwaS5vcmc" + A9 * 6),
    ("huggingface-token", "hf_" + A9 * 3),
    ("sendgrid-key", "SG." + "aB3-_" * 4 + "xy." + "aB3-_" * 8 + "xyz"),
    ("jwt", JWT),
    *(
        ("private-key", PEM.format(kind + "PRIVATE KEY"))
        for kind in ("", "RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED ")
    ),
    ("private-key", PEM.format("PGP PRIVATE KEY BLOCK")),
    ("private-key", PEM.format("RSA PRIVATE KEY").replace("\n", "\r\n")),
    ("private-key", PEM.format("RSA PRIVATE KEY").replace("\n", "\\n")),
    *(
        ("private-key", PEM.format("RSA PRIVATE KEY").replace("\n", f"\n{prefix}"))
        for prefix in ("-", "--", "+", "id_rsa-", "- ")
    ),
    (
        "private-key",
        PEM.format("RSA PRIVATE KEY").replace("\n7", "\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,AB\n\n7"),
    ),
]

CONTEXT = [
    ("aws-secret-key", 'aws_secret_access_key = "{}"', "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
    ("aws-secret-key", "export AWS_SECRET_ACCESS_KEY={}\n", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
    ("aws-secret-key", '{{\\"SecretAccessKey\\": \\"{}\\"}}', "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
    ("authorization", "curl -H 'Authorization: Bearer {}' http://x", "abcdef.ghi~jk/+="),
    ("authorization", "AUTHORIZATION=Token {}", "0123456789abcdef"),
    ("authorization", '"authorization": "bearer {}"', "opaque-word"),
    ("authorization", "header Bearer {}, sent", "opaque1" * 3),
    ("authorization", "Basic {}", base64.b64encode(b"user:password").decode()),
    ("url-password", "git clone https://user:{}@host/x.git", "p4ss:w0rd!"),
    ("url-password", "redis://:{}@localhost:6379/0", "hunter2"),
    ("url-password", "postgres://u%40x:{}@db", "pässwörd"),
    ("github-token", "https://x-access-token:{}@github.com", "ghp_" + A9 * 3),
    ("jwt", "Authorization: Bearer {}\r\n", JWT),
]
