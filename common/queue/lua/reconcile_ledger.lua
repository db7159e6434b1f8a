-- Bring the ledger to what the store holds. Works when Redis is full.
--
-- ARGV: operation, run, uid, Redis run_id, token, then the operation's own.
-- Returns {'unknown'}, {'restarted'}, {'lost'} (see prelude), or the operation's reply.
-- Counters move by the very transitions that are made here, in the same call, so they are right
-- whatever finishes meanwhile.

begin_even_when_full()
local operation, run, uid, run_id, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local why = maintenance_refused(run, uid, run_id, token)
if why then return {why} end

local bits = tonumber(redis.call('HGET', run_key(run), 'bits'))
local STATE = {c = 'd', f = 'f', x = 'c'}
local COUNTER = {d = 'completed', f = 'failed', c = 'cancelled'}
local sums = {}

local function add(counter, by) sums[counter] = (sums[counter] or 0) + by end

-- A key's place in the ledger without the detour over its hex digits: a rebuild asks for millions.
local stem, shift, skip = ledger_stem(run), 2 ^ (32 - bits), math.floor(bits / 8) + 1
local function place_of(raw)
  local bucket = math.floor(struct.unpack('>I4', raw) / shift)
  return stem .. string.format('%x', bucket), string.sub(raw, skip)
end

-- Take the job away, or for a failure keep it with its request in RQ's failed registry: a failed
-- key that is in no registry is what the claim takes for an `rq requeue`.
local function end_job(raw, hex, state)
  release(run, hex)
  redis.call('ZREM', parked_key(run), hex)
  if state == 'f' then
    redis.call('HSET', rq_job(hex), 'data', job_data(hex), 'origin', run, 'status', 'failed',
      'timeout', ARGV[7])
    redis.call('HDEL', rq_job(hex), 'holder')
    redis.call('PERSIST', rq_job(hex))
    redis.call('ZADD', rq_failed(run), FAR_FUTURE_S, hex)
  else
    redis.call('ZREM', rq_failed(run), hex)
    redis.call('ZREM', rq_canceled(run), hex)
    redis.call('UNLINK', rq_job(hex))
  end
end

-- Take a record into what the ledger has of its key already.
local function merge(raw, fingerprint, state, try)
  local hex = to_hex(raw)
  local old = ledger_get(run, raw, hex, bits)
  if old.state == 'd' then return false end
  -- A queued key waits for the end of its try; that end, or a later one, is what comes here.
  local wins = state == 'd' or try > old.try or (is_queued(old.state) and try == old.try)
  if not wins then return false end
  ledger_set(run, raw, hex, bits, fingerprint, state, try)
  end_job(raw, hex, state)
  if old.state == 'u' then add('unfed', -1) end
  if COUNTER[old.state] then add(COUNTER[old.state], -1) end
  return true
end

-- ARGV: records (45 bytes each: key 16, fingerprint 8, outcome c f x, then try, prompt tokens,
-- completion tokens as big-endian numbers of 4, 8, 8), job timeout (s).
-- The ledger's state is the reader function over all that this Redis knows already; each record is
-- taken into it the same way. Returns {'ok', keys that changed}.
local function teach()
  local blob, changed = ARGV[6], 0
  for at = 1, #blob, 45 do
    local raw, fingerprint, outcome, try, input, output =
      struct.unpack('>c16c8c1I4I8I8', blob, at)
    local state = STATE[outcome]
    local bucket, field = place_of(raw)
    local fresh = redis.call('HSETNX', bucket, field, ledger_value(fingerprint, state, try)) == 1
    if fresh then
      add('total', 1)
      if state == 'f' then end_job(raw, to_hex(raw), state) end
    end
    if fresh or merge(raw, fingerprint, state, try) then
      add(COUNTER[state], 1)
      if state == 'd' then
        add('input_tokens', input)
        add('output_tokens', output)
      end
      changed = changed + 1
    end
  end
  for counter, by in pairs(sums) do count(run, counter, by) end
  return {'ok', changed}
end

-- ARGV: keys and fingerprints (16 + 8 bytes each).
-- Returns {'ok', p or -p ...}: positions from 1 of keys that the ledger lacks, negative where it
-- holds another fingerprint.
local function compare()
  local blob, reply = ARGV[6], {'ok'}
  for at = 1, #blob, 24 do
    local value = redis.call('HGET', place_of(string.sub(blob, at, at + 15)))
    local position = (at - 1) / 24 + 1
    if not value then
      reply[#reply + 1] = position
    elseif string.sub(value, 1, 8) ~= string.sub(blob, at + 16, at + 23) then
      reply[#reply + 1] = -position
    end
  end
  return reply
end

-- Give failed jobs their request back. ARGV: pairs: key, prompt (JSON).
local function bodies()
  for i = 6, #ARGV, 2 do
    local hex = to_hex(ARGV[i])
    local entry = ledger_get(run, ARGV[i], hex, bits)
    if entry and entry.state == 'f' then
      redis.call('HSETNX', rq_job(hex), 'request', ARGV[i + 1])
    end
  end
  return {'ok'}
end

-- Read a slice of the ledger. ARGV: first bucket, buckets.
-- Returns {'ok', key, value, key, value...} of keys that have ended.
local function ended()
  local reply, first = {'ok'}, tonumber(ARGV[6])
  for bucket = first, math.min(first + tonumber(ARGV[7]), 2 ^ bits) - 1 do
    local all = redis.call('HGETALL', ledger_stem(run) .. string.format('%x', bucket))
    for i = 1, #all, 2 do
      if not is_queued(string.sub(all[i + 1], 9, 9)) then
        reply[#reply + 1] = to_raw(hex_of(bucket, all[i], bits))
        reply[#reply + 1] = all[i + 1]
      end
    end
  end
  return reply
end

-- Forget keys of which no record exists any more; `inputs/` brings them back as new.
-- ARGV: pairs: key, ledger value when it was judged. Returns {'ok', keys forgotten}.
local function forget()
  local forgotten = 0
  for i = 6, #ARGV, 2 do
    local raw, hex = ARGV[i], to_hex(ARGV[i])
    local bucket, field = bucket_of(run, hex, bits), field_of(raw, bits)
    if redis.call('HGET', bucket, field) == ARGV[i + 1] then
      redis.call('HDEL', bucket, field)
      end_job(raw, hex, 'd')
      add('total', -1)
      add(COUNTER[ledger_entry(ARGV[i + 1]).state], -1)
      forgotten = forgotten + 1
    end
  end
  for counter, by in pairs(sums) do count(run, counter, by) end
  return {'ok', forgotten}
end

local operations = {teach = teach, compare = compare, bodies = bodies, ended = ended,
  forget = forget}
return operations[operation]()
