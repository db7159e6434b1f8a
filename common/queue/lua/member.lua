-- Change one thing of a run that is there. A run that was forgotten meanwhile must not come back as a
-- hash with one member, so each of these looks first.
--
-- ARGV: operation, run, then the operation's own. Returns {'unknown'}, or {'ok', value}.

local operation, run = ARGV[1], ARGV[2]
local key = run_key(run)
if redis.call('HEXISTS', key, 'record') == 0 then return {'unknown'} end

local function set() return redis.call('HSET', key, ARGV[3], ARGV[4]) end

-- The first one stays. ARGV: member, value. Returns what stands now.
local function set_first()
  redis.call('HSETNX', key, ARGV[3], ARGV[4])
  return redis.call('HGET', key, ARGV[3])
end

local function increase() return redis.call('HINCRBY', key, ARGV[3], 1) end

-- ARGV: source of a producer, what it says of itself.
local function open() return redis.call('HSET', open_key(run), ARGV[3], ARGV[4]) end

-- ARGV: source of a producer, its last word about the seal.
local function close()
  redis.call('HDEL', open_key(run), ARGV[3])
  return redis.call('HSET', key, 'seal', ARGV[4])
end

-- ARGV: priority, what a step of it is worth in the claim order. Returns the one it had.
local function prioritise()
  local known = redis.call('HMGET', key, 'priority', 'created_ms')
  redis.call('HSET', key, 'priority', ARGV[3])
  redis.call('ZADD', RUNS, 'XX', tonumber(known[2] or 0) - tonumber(ARGV[3]) * tonumber(ARGV[4]), run)
  return known[1] or '0'
end

local operations = {set = set, set_first = set_first, increase = increase, open = open, close = close,
  prioritise = prioritise}
return {'ok', operations[operation]()}
