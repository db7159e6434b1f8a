-- The marks of one run: instants that before and after hang on. Bounded; those that were set by hand
-- outlive those that set themselves. Events of one kind within a while are one mark ("8 worker groups
-- came"): until then it stands open, and only what stands open is ever changed.
--
-- ARGV: operation, run, then the operation's own. Returns the operation's reply; false where there
-- is no such run, since a forgotten one must not come back as a hash.

local operation, run = ARGV[1], ARGV[2]
local key = marks_key(run)
if redis.call('HEXISTS', run_key(run), 'record') == 0 then return false end

local MOST_SUBJECTS = 256

local function read(id)
  local value = redis.call('HGET', key, 'm:' .. id)
  return value and cjson.decode(value) or nil
end

local function write(mark)
  redis.call('HSET', key, 'm:' .. mark.id, cjson.encode(mark))
end

-- Every id, oldest first, and the fields that say what stands open.
local function ids()
  local found, open = {}, {}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local begin = string.sub(field, 1, 2)
    if begin == 'm:' then found[#found + 1] = string.sub(field, 3) end
    if begin == 'o:' then open[#open + 1] = field end
  end
  table.sort(found)
  return found, open
end

local function open_of(field)
  return string.match(redis.call('HGET', key, field) or '', '^(%S+) (%d+)$')
end

-- Drop what is too much: the oldest that set themselves, then the oldest.
local function trim(most)
  local found, open = ids()
  local left = #found - most
  for _, own in ipairs({true, false}) do
    for i = 1, #found do
      if left > 0 and found[i] and (not own or string.find(found[i], '-self-', 1, true)) then
        redis.call('HDEL', key, 'm:' .. found[i], 'a:' .. found[i])
        found[i], left = false, left - 1
      end
    end
  end
  for _, field in ipairs(open) do
    local id = open_of(field)
    if not id or redis.call('HEXISTS', key, 'm:' .. id) == 0 then redis.call('HDEL', key, field) end
  end
end

-- ARGV: most marks, id, JSON. Returns 1, and 0 where it was there.
local function add()
  local is_new = redis.call('HSETNX', key, 'm:' .. ARGV[4], ARGV[5])
  if is_new == 1 then trim(tonumber(ARGV[3])) end
  return is_new
end

-- ARGV: most marks, then pairs: id, JSON, of what the store has. Returns how many were missing.
local function restore()
  local back = 0
  for i = 4, #ARGV, 2 do
    back = back + redis.call('HSETNX', key, 'm:' .. ARGV[i], ARGV[i + 1])
    redis.call('HSET', key, 'a:' .. ARGV[i], 1)
  end
  if back > 0 then trim(tonumber(ARGV[3])) end
  return back
end

local function is_over()
  local c = redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed', 'cancelled')
  for i = 1, 4 do c[i] = tonumber(c[i] or 0) end
  return c[1] > 0 and c[2] + c[3] + c[4] >= c[1]
end

local function index_of(list, what)
  for i, each in ipairs(list or {}) do
    if each == what then return i end
  end
end

-- One that came back within seconds has not left.
local function take_back(burst, subject, now)
  local id, last_ms = open_of('o:' .. burst)
  local mark = id and tonumber(last_ms) >= now and read(id)
  local i = mark and index_of(mark.subjects, subject)
  if not i then return end
  table.remove(mark.subjects, i)
  mark.times = math.max(mark.times - 1, #mark.subjects)
  if #mark.subjects > 0 then return write(mark) end
  redis.call('HDEL', key, 'm:' .. id, 'a:' .. id, 'o:' .. burst)
end

local function widen(range, from, to)
  if not range then return {from, from, to, to} end
  return {math.min(range[1], from), math.max(range[2], from), math.min(range[3], to),
    math.max(range[4], to)}
end

-- ARGV: most marks, how long ago (ms), kind, burst (what joins what), subject or '', detail, how
-- long it stays open after its last event and after its first (ms), cap before and after or '',
-- burst from which the subject is taken back or '', '1' if only of a run that is not over.
-- Returns the mark's id, false where none was made.
local function note()
  local now = now_ms()
  local at, burst, subject = now - tonumber(ARGV[4]), ARGV[6], ARGV[7]
  if ARGV[14] == '1' and is_over() then return false end
  if ARGV[13] ~= '' then take_back(ARGV[13], subject, now) end
  local id, last_ms = open_of('o:' .. burst)
  local mark = id and tonumber(last_ms) >= now and read(id) or nil
  local is_new = not mark
  if is_new then
    id = mark_id(run, at, string.format('%.0f', at) .. burst .. subject)
    mark = {id = id, kind = ARGV[5], at_ms = at, until_ms = at, times = 0, detail = ARGV[8]}
  end
  mark.at_ms, mark.until_ms = math.min(mark.at_ms, at), math.max(mark.until_ms, at)
  mark.times = mark.times + 1
  if subject ~= '' and not index_of(mark.subjects, subject) then
    mark.subjects = mark.subjects or {}
    if #mark.subjects < MOST_SUBJECTS then
      mark.subjects[#mark.subjects + 1] = subject
    else
      mark.more = (mark.more or 0) + 1
    end
  end
  if ARGV[11] ~= '' then mark.cap = widen(mark.cap, tonumber(ARGV[11]), tonumber(ARGV[12])) end
  write(mark)
  local open_ms = math.min(now + tonumber(ARGV[9]), mark.at_ms + tonumber(ARGV[10]))
  redis.call('HSET', key, 'o:' .. burst, id .. ' ' .. string.format('%.0f', open_ms))
  if is_new then trim(tonumber(ARGV[3])) end
  return id
end

-- ARGV: '1' to close what stands open, since nobody may come by later. Returns the JSON of marks that
-- the store does not have and that do not change any more.
local function settled()
  local now, stands, reply = now_ms(), {}, {}
  local found, open = ids()
  for _, field in ipairs(open) do
    local id, last_ms = open_of(field)
    if ARGV[3] == '1' or not id or tonumber(last_ms) < now then
      redis.call('HDEL', key, field)
    else
      stands[id] = true
    end
  end
  for _, id in ipairs(found) do
    if not stands[id] and redis.call('HEXISTS', key, 'a:' .. id) == 0 then
      reply[#reply + 1] = redis.call('HGET', key, 'm:' .. id)
    end
  end
  return reply
end

-- ARGV: ids that are in the store.
local function archived()
  for i = 3, #ARGV do
    if redis.call('HEXISTS', key, 'm:' .. ARGV[i]) == 1 then redis.call('HSET', key, 'a:' .. ARGV[i], 1) end
  end
  return 1
end

-- ARGV: how many, the newest; '' for all. Returns their JSON, oldest first.
local function latest()
  local found, reply = ids(), {}
  for i = math.max(1, #found - (tonumber(ARGV[3]) or #found) + 1), #found do
    reply[#reply + 1] = redis.call('HGET', key, 'm:' .. found[i])
  end
  return reply
end

local operations = {add = add, restore = restore, note = note, settled = settled,
  archived = archived, latest = latest}
return operations[operation]()
