-- The turn of the one process that reconciles or ends a run. Works when Redis is full.
--
-- ARGV: operation, run, uid, Redis run_id that the caller has read, token, then the operation's own.
-- Returns {'unknown'}, {'restarted'}, {'lost'} (see prelude), {'busy'}, or the operation's reply.

begin_even_when_full()
local operation, run, uid, run_id, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- Returns {'ok', reconciled, a deep reconcile was begun and not ended (1 or 0 each), then for each
-- partition: last closed sequence, sequence of the standing intent or 0}.
local function begin()
  if redis.call('HGET', run_key(run), 'uid') ~= uid then return {'unknown'} end
  if server_run_id() ~= run_id then return {'restarted'} end
  local held_by = redis.call('GET', maintenance_key(run))
  if held_by and held_by ~= token then return {'busy'} end
  redis.call('SET', maintenance_key(run), token, 'PX', TURN_MS)
  local known = redis.call('HMGET', run_key(run), 'partitions', 'reconciled', 'deep')
  local reply = {'ok', known[2] == run_id and 1 or 0, known[3] and 1 or 0}
  for partition = 0, tonumber(known[1]) - 1 do
    local sink = redis.call('HMGET', sink_key(run, partition), 'seq', 'intent')
    reply[#reply + 1] = tonumber(sink[1] or 0)
    reply[#reply + 1] = sink[2] and cjson.decode(sink[2]).seq or 0
  end
  return reply
end

if operation == 'begin' then return begin() end
local why = maintenance_refused(run, uid, run_id, token)
if why then return {why} end

local function renew() return {'ok'} end

-- The store says that the run was cancelled; who has ended what must be found out anew.
local function cancelled()
  redis.call('HSET', run_key(run), 'cancelled', '1')
  redis.call('HDEL', run_key(run), 'cancel_done')
  redis.call('UNLINK', rq_queue(run))
  return {'ok'}
end

-- Let claims and sinks wait until the closing mark of a deep reconcile, this one or, should its process
-- die, the next: only a deep one counts anew what lost records had counted.
local function distrust()
  redis.call('HSET', run_key(run), 'deep', '1')
  redis.call('HDEL', run_key(run), 'reconciled')
  return {'ok'}
end

-- The model that the store says the run began with: a rewound Redis may have taken another since.
local function pin()
  redis.call('HSET', run_key(run), 'pinned', ARGV[6])
  return {'ok'}
end

local function finish()
  redis.call('DEL', maintenance_key(run))
  return {'ok'}
end

local partitions = tonumber(redis.call('HGET', run_key(run), 'partitions'))

local function waiting()
  local entries = 0
  for partition = 0, partitions - 1 do
    entries = entries + redis.call('XLEN', results_key(run, partition))
  end
  return entries
end

-- What the end of a run hangs on, at one instant.
-- Returns {'ok', reconciled, sealed, cancelled (1 or 0 each), total, completed, failed, cancelled,
-- entries in all streams, sum of the sequences}.
local function facts()
  local known = redis.call('HMGET', run_key(run), 'reconciled', 'seal', 'cancelled')
  local sealed = known[2] == '1' and redis.call('HLEN', open_key(run)) == 0
  local reply = {'ok', known[1] == run_id and 1 or 0, sealed and 1 or 0, known[3] and 1 or 0}
  local counts = redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed', 'cancelled')
  for i = 1, 4 do reply[#reply + 1] = tonumber(counts[i] or 0) end
  local seqs = 0
  for partition = 0, partitions - 1 do
    seqs = seqs + tonumber(redis.call('HGET', sink_key(run, partition), 'seq') or 0)
  end
  reply[#reply + 1] = waiting()
  reply[#reply + 1] = seqs
  return reply
end

-- Note for which state `_SUCCESS` was written, or that one may stand ('pending'), or none ('').
local function ended()
  if ARGV[6] == '' then
    redis.call('HDEL', run_key(run), 'ended')
  else
    redis.call('HSET', run_key(run), 'ended', ARGV[6])
  end
  return {'ok'}
end

-- The closing mark of a reconcile. ARGV: highest sequence of inputs/, seal or '' (leave it),
-- records and bytes in the store, prompt and completion tokens of all that is completed there or '',
-- then for each partition its last closed sequence.
local function close()
  local known, listed = tonumber(redis.call('HGET', run_key(run), 'inputs_seq') or 0), tonumber(ARGV[6])
  redis.call('HSET', run_key(run), 'inputs_seq', math.max(known, listed))
  -- A producer that is open, or has taken a number since inputs/ was listed, has the last word itself.
  if ARGV[7] ~= '' and known <= listed and redis.call('HLEN', open_key(run)) == 0 then
    redis.call('HSET', run_key(run), 'seal', ARGV[7])
  end
  redis.call('HSET', counts_key(run), 's3_uploaded', ARGV[8], 's3_bytes', ARGV[9])
  if ARGV[10] ~= '' and waiting() == 0 then
    redis.call('HSET', counts_key(run), 'input_tokens', ARGV[10], 'output_tokens', ARGV[11])
  end
  for i = 12, #ARGV do
    local sink = sink_key(run, i - 12)
    local state = redis.call('HMGET', sink, 'seq', 'intent')
    local seq = math.max(tonumber(state[1] or 0), tonumber(ARGV[i]))
    redis.call('HSET', sink, 'seq', seq)
    if state[2] and cjson.decode(state[2]).seq <= seq then
      redis.call('HDEL', sink, 'intent', 'tries')
    end
  end
  redis.call('HSET', run_key(run), 'reconciled', run_id)
  redis.call('HDEL', run_key(run), 'deep')
  return {'ok'}
end

local operations = {renew = renew, distrust = distrust, finish = finish, facts = facts,
  cancelled = cancelled, ended = ended, close = close, pin = pin}
return operations[operation]()
