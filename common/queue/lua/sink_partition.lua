-- One partition as its sink handles it: the lease, the intent, the acknowledgement.
-- Every operation works when Redis is full: a sink is what makes room again.
--
-- ARGV: operation, run, uid, partition, token of this sink, then the operation's own.
-- Returns {'unknown'} (no such run with this uid), {'unreconciled'} (Redis restarted: all waits for
-- a reconcile), {'held', ms} or {'lost'} (another sink's token), {'changed'} (another intent stands
-- than the caller believes), or the operation's own reply.

begin_even_when_full()
local operation, run, uid, partition, token = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local sink = sink_key(run, partition)
local stream = results_key(run, partition)

local known = redis.call('HMGET', run_key(run), 'uid', 'reconciled', 'bits')
if known[1] ~= uid then return {'unknown'} end
local state = redis.call('HMGET', sink, 'token', 'deadline_ms', 'seq', 'intent', 'tries', 'limit',
  'until')
local held_by, deadline_ms, seq = state[1], tonumber(state[2] or 0), tonumber(state[3] or 0)
local intent = state[4] or ''

if operation == 'release' then
  if held_by == token then redis.call('HDEL', sink, 'token', 'deadline_ms') end
  redis.call('ZREM', sinks_key(run), token)
  return {'ok'}
end

if known[2] ~= server_run_id() then return {'unreconciled'} end

-- Take the partition, or renew it. ARGV: how long (ms).
-- Returns {'ok', last closed sequence, standing intent or '', tries, limit or 0, until or ''}.
local function take()
  local now = now_ms()
  if held_by and held_by ~= token and deadline_ms > now then
    return {'held', string.format('%.0f', deadline_ms - now)}
  end
  redis.call('HSET', sink, 'token', token, 'deadline_ms', string.format('%.0f', now + tonumber(ARGV[6])))
  return {'ok', seq, intent, tonumber(state[5] or 0), tonumber(state[6] or 0),
    state[7] or ''}
end

if operation == 'take' then return take() end
-- The token is random: a counter would repeat after a rewind of Redis.
if held_by ~= token then return {'lost'} end

-- Begin the next sequence. ARGV: its number, the intent (JSON).
local function intend()
  if intent ~= '' or seq + 1 ~= tonumber(ARGV[6]) then return {'changed'} end
  redis.call('HSET', sink, 'intent', ARGV[7], 'tries', 0)
  return {'ok'}
end

-- Count an attempt at the standing intent before it is made, so that a death in it is counted too;
-- or take it back when the store was to blame. ARGV: intent, 1 or -1. Returns {'ok', tries}.
local function attempt()
  if intent ~= ARGV[6] then return {'changed'} end
  return {'ok', redis.call('HINCRBY', sink, 'tries', tonumber(ARGV[7]))}
end

-- A manifest stands: delete its entries by id, go on to the next sequence, clear the intent.
-- ARGV: intent, its sequence, records and bytes now in the store, limit of the next batches ('' as it
--   is, 0 none) and the entry until which it holds, then pairs: entry id, length of its row.
--   A void acknowledges nothing.
local function close()
  -- After a rewind the same token may stand with an older intent, whose entries these are not.
  if intent ~= ARGV[6] then return {'changed'} end
  local bytes, entries = 0, 0
  for i = 12, #ARGV, 2 do
    if redis.call('XDEL', stream, ARGV[i]) == 1 then
      bytes = bytes + tonumber(ARGV[i + 1]) + 100
      entries = entries + 1
    end
  end
  count(run, 'stream_bytes', -bytes)
  count(run, 'stream_entries', -entries)
  count(run, 's3_uploaded', tonumber(ARGV[8]))
  count(run, 's3_bytes', tonumber(ARGV[9]))
  redis.call('HDEL', sink, 'intent', 'tries', 'error')
  redis.call('HSET', sink, 'seq', ARGV[7])
  if ARGV[10] ~= '' then redis.call('HSET', sink, 'limit', ARGV[10], 'until', ARGV[11]) end
  return {'ok', entries}
end

-- The store holds a manifest of this sequence with other rows than ours: a sink of a past that this
-- Redis has forgotten wrote it. Let the whole run be reconciled; until then claims and sinks wait.
local function distrust()
  if intent ~= ARGV[6] then return {'changed'} end
  redis.call('HDEL', run_key(run), 'reconciled')
  return {'ok'}
end

-- Say for `producer status` why nothing is stored; the next `close` takes it back. ARGV: text.
local function complain()
  redis.call('HSET', sink, 'error', ARGV[6])
  return {'ok'}
end

local operations = {intend = intend, attempt = attempt, close = close, distrust = distrust,
  complain = complain}
return operations[operation]()
