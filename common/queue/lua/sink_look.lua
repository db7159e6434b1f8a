-- What a sink sees of a run at one instant. Works when Redis is full.
--
-- ARGV: run, uid, token of this sink, how long it counts as present (ms).
-- Returns {'unknown'} when the run is not there with this uid, else
--   {'ok', now (ms), reconciled, sealed, cancelled (1 or 0 each), total, completed, failed, cancelled,
--   stream bytes, prompts that wait in inputs/, sinks present, '1' if the streams near what stops
--   claims, signature of the last `_SUCCESS` or '', then for each partition: entries, first entry's id
--   or '', token or '', deadline (ms), last closed sequence}

begin_even_when_full()
local run, uid, token, present_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local known = redis.call('HMGET', run_key(run), 'uid', 'partitions', 'reconciled', 'seal',
  'cancelled', 'ended')
if known[1] ~= uid then return {'unknown'} end
local now = now_ms()

redis.call('ZREMRANGEBYSCORE', sinks_key(run), '-inf', now)
redis.call('ZADD', sinks_key(run), now + present_ms, token)

local sealed = known[4] == '1' and redis.call('HLEN', open_key(run)) == 0
local counts = redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed', 'cancelled',
  'stream_bytes', 'unfed')
local reply = {'ok', now, known[3] == server_run_id() and 1 or 0, sealed and 1 or 0,
  known[5] and 1 or 0}
for i = 1, 6 do reply[#reply + 1] = tonumber(counts[i] or 0) end
reply[#reply + 1] = redis.call('ZCARD', sinks_key(run))
reply[#reply + 1] = streams_half_full() and '1' or ''
reply[#reply + 1] = known[6] or ''

local waiting = 0
for partition = 0, tonumber(known[2]) - 1 do
  local stream = results_key(run, partition)
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)
  local sink = redis.call('HMGET', sink_key(run, partition), 'token', 'deadline_ms', 'seq')
  local entries = redis.call('XLEN', stream)
  waiting = waiting + entries
  reply[#reply + 1] = entries
  reply[#reply + 1] = first[1] and first[1][1] or ''
  reply[#reply + 1] = sink[1] or ''
  reply[#reply + 1] = tonumber(sink[2] or 0)
  reply[#reply + 1] = tonumber(sink[3] or 0)
end

-- Somebody else's hand trimmed or deleted the streams: what is counted of them would stop the claims for
-- ever, with nothing left to store. What was lost is found by the end test, and queued again.
if waiting == 0 and tonumber(redis.call('HGET', counts_key(run), 'stream_bytes') or 0) ~= 0 then
  redis.call('HSET', counts_key(run), 'stream_bytes', 0, 'stream_entries', 0)
end
return reply
