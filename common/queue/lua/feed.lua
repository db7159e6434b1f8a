-- Bring requests that wait in inputs/ into RQ's queue as room comes. One process at a time, under a
-- lease with a random token; every step may be repeated.
--
-- ARGV: operation, run, uid, token, then the operation's own.
-- Returns {'unknown'}, {'unreconciled'}, {'busy'} or {'lost'} (the turn ran out), or the operation's reply.
-- `feed_from` is the sequence of the first object of inputs/ that may hold a waiting prompt. Prompts
-- that came to wait since that was read last are told by `feed_dirty`: the least of their sequences.

local operation, run, uid, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local LEASE_MS = 10000
local LEAST = 4

local function begin_refused()
  local known = redis.call('HMGET', run_key(run), 'uid', 'reconciled')
  if known[1] ~= uid then return 'unknown' end
  -- The ledger may be behind the store: what it calls waiting may have ended.
  if known[2] ~= server_run_id() then return 'unreconciled' end
  local held_by = redis.call('GET', feed_key(run))
  if held_by and held_by ~= token then return 'busy' end
  return nil
end

-- Returns {why} (unknown, unreconciled, busy, idle: nothing waits, or there is no room worth it), else
-- {'ok', sequence to go on with, sequence from which all is to be read again or '', requests that may be fed}.
local function begin()
  local why = begin_refused()
  if why then return {why} end
  local room, window, waiting = window_room(run)
  if waiting <= 0 then return {'idle'} end
  -- What waits in a cancelled run ends as cancelled: `common.cancelling`.
  if redis.call('HEXISTS', run_key(run), 'cancelled') == 1 then return {'idle'} end
  if memory_share() > MOST_FED or room < math.min(window / LEAST, 10000) then room = 0 end
  if room < 1 then return {'idle'} end
  redis.call('SET', feed_key(run), token, 'PX', LEASE_MS)
  local known = redis.call('HMGET', run_key(run), 'feed_from', 'feed_dirty', 'feed_by')
  local from, dirty = tonumber(known[1] or 0), tonumber(known[2])
  local again = known[3] ~= token and 0 or dirty or ''
  if dirty then from = math.min(from, dirty) end
  if dirty then redis.call('HDEL', run_key(run), 'feed_dirty') end
  redis.call('HSET', run_key(run), 'feed_from', from, 'feed_by', token)
  return {'ok', from, again, room}
end

-- ARGV: job timeout (s), most to feed, then triples: key, fingerprint, prompt (JSON), in order.
-- Returns {'ok', how many of them were looked at, how many were fed}.
local function feed()
  local bits = tonumber(redis.call('HGET', run_key(run), 'bits'))
  local room = math.min(window_room(run), tonumber(ARGV[6]))
  if memory_share() > MOST_FED then room = 0 end
  local push, looked = {}, 0
  for i = 7, #ARGV, 3 do
    if #push >= room then break end
    looked = looked + 1
    local raw, hex = ARGV[i], to_hex(ARGV[i])
    local entry = ledger_get(run, raw, hex, bits)
    -- Another fingerprint: another text was accepted since, which stands further on.
    if entry and entry.state == 'u' and entry.fingerprint == ARGV[i + 1] then
      ledger_set(run, raw, hex, bits, entry.fingerprint, 'q', entry.try)
      write_job(run, hex, ARGV[i + 2], ARGV[5], 'queued')
      push[#push + 1] = hex
    end
  end
  for first = 1, #push, 1000 do
    redis.call('RPUSH', rq_queue(run), unpack(push, first, math.min(first + 999, #push)))
  end
  if #push > 0 then redis.call('SADD', RQ_QUEUES, rq_queue(run)) end
  count(run, 'unfed', -#push)
  return {'ok', looked, #push}
end

-- The object of this sequence is through. ARGV: it, and the sequence to go on with.
local function advance()
  if tonumber(redis.call('HGET', run_key(run), 'feed_from') or 0) == tonumber(ARGV[5]) then
    redis.call('HSET', run_key(run), 'feed_from', ARGV[6])
  end
  return {'ok'}
end

local function finish()
  redis.call('DEL', feed_key(run))
  return {'ok'}
end

if operation == 'begin' then return begin() end
local why = begin_refused()
if why then return {why} end
if redis.call('GET', feed_key(run)) ~= token then return {'lost'} end
redis.call('PEXPIRE', feed_key(run), LEASE_MS)
local operations = {feed = feed, advance = advance, finish = finish}
return operations[operation]()
