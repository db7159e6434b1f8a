-- Take an entry that cannot be stored out of a result stream. Works when Redis is full.
--
-- ARGV: run, uid, partition, token, entry id, key (16 bytes, or '' when the entry names none), try,
--   outcome (c f x), failure row, prompt (JSON), job timeout (s).
-- With a key: the entry's place is taken by a failure of the same try, and the job is there again
-- with its request, in RQ's failed registry, in this same call. Without: the entry is kept in a
-- hash for people to look at; no prompt counts on it.
-- Returns {'unknown'}, {'unreconciled'}, {'lost'}, {'gone'}, {'ok'}.

begin_even_when_full()
local run, uid, partition, token, id = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local raw, try, outcome = ARGV[6], ARGV[7], ARGV[8]
local row, prompt, timeout_s = ARGV[9], ARGV[10], ARGV[11]

local known = redis.call('HMGET', run_key(run), 'uid', 'reconciled', 'bits')
if known[1] ~= uid then return {'unknown'} end
if known[2] ~= server_run_id() then return {'unreconciled'} end
if redis.call('HGET', sink_key(run, partition), 'token') ~= token then return {'lost'} end

local stream = results_key(run, partition)
local found = redis.call('XRANGE', stream, id, id)
if not found[1] then return {'gone'} end
local fields = {}
for i = 1, #found[1][2], 2 do fields[found[1][2][i]] = found[1][2][i + 1] end

redis.call('XDEL', stream, id)
-- What somebody else added by hand was never counted; what came by the finish script has all fields.
local ours = fields.k and fields.r and fields.i and fields.n
if ours then
  count(run, 'stream_bytes', -(#fields.r + 100))
  count(run, 'stream_entries', -1)
end
if raw == '' then
  redis.call('HSET', set_aside_key(run), string.format('%02d:%s', partition, id),
    cmsgpack.pack(fields))
  count(run, 'set_aside', 1)
  return {'ok'}
end

local STATE = {c = 'd', f = 'f', x = 'c'}
local COUNTER = {c = 'completed', f = 'failed', x = 'cancelled'}
local bits, hex = tonumber(known[3]), to_hex(raw)
local entry = ledger_get(run, raw, hex, bits)
-- Another try or a stored completion stands in the ledger: this entry was superseded anyway.
if not entry or entry.state ~= STATE[outcome] or entry.try ~= tonumber(try) then return {'ok'} end

redis.call('XADD', stream, '*', 'k', raw, 'f', entry.fingerprint, 't', try, 'o', 'f', 'r', row,
  'i', 0, 'n', 0)
count(run, 'stream_bytes', #row + 100)
count(run, 'stream_entries', 1)
count(run, COUNTER[outcome], -1)
count(run, 'failed', 1)
if outcome == 'c' then
  count(run, 'input_tokens', -(tonumber(fields.i) or 0))
  count(run, 'output_tokens', -(tonumber(fields.n) or 0))
end
ledger_set(run, raw, hex, bits, entry.fingerprint, 'f', try)
write_job(run, hex, prompt, timeout_s, 'failed')
redis.call('ZADD', rq_failed(run), FAR_FUTURE_S, hex)
return {'ok'}
