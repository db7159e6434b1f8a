-- Count a run anew by its ledger, where its counters are not its ledger's, and list it where it is not:
-- somebody has removed keys of it, or a Redis that was set to evict has. Works when Redis is full.
--
-- ARGV: run, uid.
-- Returns {'unknown'} when the run is not there with this uid, else {'ok', 1 if something was wrong}.
-- Looking is cheap; counting holds Redis for about a second per million prompts, once after such
-- a loss. One step, since whatever ends meanwhile moves the same counters.

begin_even_when_full()
local run, uid = ARGV[1], ARGV[2]
local known = redis.call('HMGET', run_key(run), 'uid', 'bits', 'partitions', 'created_ms', 'priority')
if known[1] ~= uid then return {'unknown'} end
local stem, last_bucket, wrong = ledger_stem(run), 2 ^ tonumber(known[2]) - 1, 0

if not redis.call('ZSCORE', RUNS, run) then
  -- Priority first, then age: `common.queue.runs`.
  local order = tonumber(known[4] or 0) - tonumber(known[5] or 0) * 10000000000000
  redis.call('ZADD', RUNS, string.format('%.0f', order), run)
  redis.call('SADD', RQ_QUEUES, rq_queue(run))
  wrong = 1
end

local counts = redis.call('HMGET', counts_key(run), 'total', 'stream_entries')
local held = 0
for bucket = 0, last_bucket do
  held = held + redis.call('HLEN', stem .. string.format('%x', bucket))
end

-- A run is made with a total of 0. Counters that are not there may fit a ledger that is not there either.
if held ~= tonumber(counts[1] or -1) then
  local n = {q = 0, u = 0, d = 0, f = 0, c = 0}
  for bucket = 0, last_bucket do
    local fields = redis.call('HGETALL', stem .. string.format('%x', bucket))
    for i = 2, #fields, 2 do
      local state = string.sub(fields[i], 9, 9)
      n[state] = (n[state] or 0) + 1
    end
  end
  redis.call('HSET', counts_key(run), 'total', held, 'completed', n.d, 'failed', n.f,
    'cancelled', n.c, 'unfed', n.u)
  wrong = 1
end

-- Results, and their bytes as finishes count them. What somebody else added by hand lacks a field and was
-- never counted (`sink_set_aside`).
local function results_waiting(partition)
  local results, bytes, first = 0, 0, '-'
  repeat
    local step = redis.call('XRANGE', results_key(run, partition), first, '+', 'COUNT', 100)
    for _, entry in ipairs(step) do
      local fields = {}
      for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
      if fields.k and fields.r and fields.i and fields.n then
        results, bytes = results + 1, bytes + #fields.r + 100
      end
      first = '(' .. entry[1]
    end
  until #step < 100
  return results, bytes
end

local counted, entries = tonumber(counts[2] or 0), 0
for partition = 0, tonumber(known[3]) - 1 do
  entries = entries + redis.call('XLEN', results_key(run, partition))
end
if entries ~= counted then
  local results, bytes = 0, 0
  for partition = 0, tonumber(known[3]) - 1 do
    local more, more_bytes = results_waiting(partition)
    results, bytes = results + more, bytes + more_bytes
  end
  if results ~= counted then
    redis.call('HSET', counts_key(run), 'stream_entries', results, 'stream_bytes', bytes)
    wrong = 1
  end
end
return {'ok', wrong}
