-- Which worker groups there are, and what they bring to the runs that they serve.
--
-- ARGV: operation, worker group, then the operation's own. A value is `HEARD LEFT JSON`: when it was
-- last heard (ms), 1 where it has left since, what it was.

local operation, group = ARGV[1], ARGV[2]
local MOST, DAY_MS = 1000, 86400000

local function say(now, left, about)
  redis.call('HSET', PRESENT, group, string.format('%.0f', now) .. ' ' .. left .. ' ' .. about)
end

-- Names of machines may come and go for ever: of those that nobody has heard for a day none is kept
-- where there are many.
local function sweep(now)
  if redis.call('HLEN', PRESENT) <= MOST then return end
  local all = redis.call('HGETALL', PRESENT)
  for i = 1, #all, 2 do
    local heard = tonumber(string.match(all[i + 1], '^%d+') or 0)
    if now - heard > DAY_MS then redis.call('HDEL', PRESENT, all[i]) end
  end
end

-- ARGV: JSON. Returns {now (ms), what was known before or ''}.
local function arrive()
  local now, before = now_ms(), redis.call('HGET', PRESENT, group)
  say(now, 0, ARGV[3])
  sweep(now)
  return {string.format('%.0f', now), before or ''}
end

-- ARGV: JSON, tokens generated since the last call, ms of running requests, ms of being ready, then
-- the runs that it serves.
local function work()
  local now = now_ms()
  say(now, 0, ARGV[3])
  for i = 7, #ARGV do
    local run = ARGV[i]
    local c = redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed', 'cancelled')
    for part = 1, 4 do c[part] = tonumber(c[part] or 0) end
    if c[1] > c[2] + c[3] + c[4] and redis.call('HEXISTS', run_key(run), 'record') == 1 then
      note_history(run, now, 0, 0, tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
    end
  end
  return 1
end

-- ARGV: when it was last heard, as whoever calls has read it; '' where it says so itself. Returns 1
-- where that makes it leave: another caller may have said so, or it may have spoken again.
local function leave()
  local heard, left, about = string.match(redis.call('HGET', PRESENT, group) or '',
    '^(%d+) (%d) (.*)$')
  if not heard or left == '1' or (ARGV[3] ~= '' and ARGV[3] ~= heard) then return 0 end
  say(ARGV[3] ~= '' and tonumber(heard) or now_ms(), 1, about)
  return 1
end

local operations = {arrive = arrive, work = work, leave = leave}
return operations[operation]()
