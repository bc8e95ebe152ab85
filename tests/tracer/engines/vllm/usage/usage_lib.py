from enum import StrEnum


class UsageContext(StrEnum):
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
