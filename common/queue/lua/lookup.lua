-- Read ledger entries; writes nothing.
-- ARGV: run, then keys (16 bytes). Returns one ledger value or '' a key, in order.

local run = ARGV[1]
local bits = tonumber(redis.call('HGET', run_key(run), 'bits'))
local reply = {}
for i = 2, #ARGV do
  local raw = ARGV[i]
  reply[i - 1] = bits and
    redis.call('HGET', bucket_of(run, to_hex(raw), bits), field_of(raw, bits)) or ''
end
return reply
