"""Sizes beyond which a request is refused; `docs/serving/limits.md` lists them."""

# Bytes of the request line and the headers together.
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
# Seconds that a connection may take to send the head of a request.
HEADER_TIMEOUT_S = 30.0
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
# Characters of a request id, a model name or a cache salt.
MAX_NAME_LENGTH = 256
# Strings or ids in one list; what a parameter allows is checked where it is used.
MAX_LIST_LENGTH = 1_000_000
# In answers about bad input.
MAX_LISTED_ERRORS = 10
MAX_INPUT_CHARS = 200
MAX_MESSAGE_CHARS = 2000
MAX_IGNORED_FIELDS = 20
