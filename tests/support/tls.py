"""One TLS context for all clients of servers that speak plain HTTP.

httpx makes one for each client, and reads every certificate authority there is for it: a tenth of
a second, for nothing.
"""

import ssl

TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
