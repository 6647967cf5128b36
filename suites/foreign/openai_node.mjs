// openai-node as programs use it: streams, helpers, raw answers, tools, every family of calls, errors.
// Writes one JSON line for each case, as case_log.py does. NODE_MODULES says where the package lies.

import { createRequire } from 'node:module'

const OpenAI = createRequire(`${process.env.NODE_MODULES}/`)('openai')
const [baseURL, model] = process.argv.slice(2)
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: 'any', maxRetries: 0, timeout: 60_000 })

const VOLATILE = new Set([
  'id', 'call_id', 'cache_write_tokens', 'cached_tokens', 'completed_at', 'created', 'created_at', 'item_id', 'request_id',
  '_request_id', 'prompt_tokens_details',
])
const ONE_ANSWER = new Set(['date', 'content-length', 'x-request-id'])
const SAID = 'Zeile eins\nline two: naïve 😀 café, 日本語'
const CALLED = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
const messages = [{ role: 'user', content: 'Which file holds the parser?' }]
const parameters = { type: 'object', properties: { town: { type: 'string' } }, required: ['town'] }
const tools = [{ type: 'function', function: { name: 'weather', parameters } }]
const says = (text) => ({ structured_outputs: { choice: [text] } })
const body = { model, messages, max_tokens: 64, ...says(SAID) }
const text = { format: { type: 'json_schema', name: 'only', schema: { type: 'object', properties: { file: { const: 'a.py' } }, required: ['file'], additionalProperties: false } } }
const asked = { model, input: 'Which file?', max_output_tokens: 32, temperature: 0, text }

function shape(value) {
  if (Array.isArray(value)) return value.map(shape)
  if (value === null || typeof value !== 'object') return value
  const members = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1))
  return Object.fromEntries(members.map(([key, each]) => [key, VOLATILE.has(key) ? '…' : shape(each)]))
}

function headers(found) {
  return Object.fromEntries([...found].map(([key, each]) => [`header ${key}`, ONE_ANSWER.has(key) ? '…' : each]).sort())
}

async function gathered(stream) {
  const seen = { text: '', names: [], arguments: '', reasons: [], usage: null }
  for await (const chunk of stream) {
    seen.usage = shape(chunk.usage ?? seen.usage)
    for (const { delta, finish_reason } of chunk.choices) {
      seen.text += delta.content ?? ''
      if (finish_reason) seen.reasons.push(finish_reason)
      for (const call of delta.tool_calls ?? []) {
        if (call.function.name) seen.names.push(call.function.name)
        seen.arguments += call.function.arguments ?? ''
      }
    }
  }
  return seen
}

async function everyEvent(stream) {
  const kinds = []
  for await (const event of stream) if (!event.type.endsWith('.delta')) kinds.push(event.type)
  return kinds
}

const cases = {
  'models: list': async () => {
    const found = []
    for await (const each of client.models.list()) found.push(shape(each))
    return { found }
  },
  'chat': async () => ({ answer: shape(await client.chat.completions.create(body)) }),
  'chat: stream': async () => gathered(await client.chat.completions.create({ ...body, stream: true })),
  'chat: stream with usage': async () =>
    gathered(await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })),
  'chat: stream helper': async () => {
    const stream = client.chat.completions.stream(body)
    let heard = ''
    stream.on('content', (delta) => (heard += delta))
    return { answer: shape(await stream.finalChatCompletion()), heard }
  },
  'chat: readable stream': async () => {
    const stream = await client.chat.completions.create({ ...body, stream: true })
    const lines = (await new Response(stream.toReadableStream()).text()).trim().split('\n')
    return { text: lines.map((line) => JSON.parse(line).choices[0]?.delta.content ?? '').join('') }
  },
  'chat: with response': async () => {
    const { data, response } = await client.chat.completions.create(body).withResponse()
    return { answer: shape(data), status: response.status, ...headers(response.headers) }
  },
  'chat: as response': async () => {
    const response = await client.chat.completions.create({ ...body, stream: true }).asResponse()
    const lines = (await response.text()).split('\n')
    return { status: response.status, ...headers(response.headers), last: lines.slice(-3) }
  },
  'chat: tools': async () => ({
    answer: shape(await client.chat.completions.create({ ...body, tools, ...says(CALLED) })),
  }),
  'chat: tools, stream': async () =>
    gathered(await client.chat.completions.create({ ...body, tools, ...says(CALLED), stream: true })),
  'chat: tool runner': async () => {
    const called = []
    const weather = { name: 'weather', parameters, parse: JSON.parse, function: (input) => (called.push(input), 'rain') }
    const runner = client.chat.completions.runTools(
      { ...body, ...says(CALLED), tools: [{ type: 'function', function: weather }] },
      { maxChatCompletions: 2 },
    )
    await runner.done()
    return { called, roles: runner.messages.map((message) => message.role) }
  },
  'chat: aborted in the middle': async () => {
    const stream = await client.chat.completions.create({ model, messages, ignore_eos: true, stream: true })
    for await (const _ of stream) break
    stream.controller.abort()
    return { answer: shape(await client.chat.completions.create(body)) }
  },
  'chat: eight at once': async () => {
    const calls = [...Array(8).keys()].map((n) => client.chat.completions.create({ ...body, ...says(`answer ${n}`) }))
    return { texts: (await Promise.all(calls)).map((answer) => answer.choices[0].message.content) }
  },
  'completions': async () => ({
    answer: shape(await client.completions.create({ model, prompt: 'def parse(', max_tokens: 8 })),
  }),
  'completions: stream': async () => {
    let text = ''
    const stream = await client.completions.create({ model, prompt: 'def parse(', max_tokens: 8, stream: true })
    for await (const chunk of stream) text += chunk.choices[0]?.text ?? ''
    return { text }
  },
  'responses': async () => ({ answer: shape(await client.responses.create(asked)) }),
  'responses: stream': async () => ({
    kinds: await everyEvent(await client.responses.create({ ...asked, stream: true })),
  }),
  'responses: stream helper': async () => {
    const stream = client.responses.stream(asked)
    return { answer: shape(await stream.finalResponse()) }
  },
}

const refused = {
  'error: unknown model': () => client.chat.completions.create({ ...body, model: 'nobody' }),
  'error: value out of range': () => client.chat.completions.create({ ...body, temperature: 99 }),
  'error: wrong type': () => client.chat.completions.create({ ...body, messages: 'no list' }),
  'error: stream of a bad call': () => client.chat.completions.create({ ...body, stream: true, top_logprobs: -3 }),
  'error: models: retrieve': () => client.models.retrieve(model),
  'error: responses: unknown id': () => client.responses.retrieve('resp_unknown'),
  'error: embeddings of a text model': () => client.embeddings.create({ model, input: 'x' }),
  'error: files': () => client.files.list(),
  'error: timeout of the client': () => client.chat.completions.create(body, { timeout: 1 }),
}

const write = (name, outcome, saw) => process.stdout.write(`${JSON.stringify({ case: name, outcome, saw })}\n`)
const refusal = (error) => ({
  exception: error.constructor.name,
  status: error.status ?? null,
  body: shape(error.error ?? null),
  content_type: error.headers?.get('content-type') ?? null,
})

for (const [name, run] of Object.entries(cases)) {
  try {
    write(name, 'passed', await run())
  } catch (error) {
    write(name, 'failed', { ...refusal(error), message: String(error).slice(0, 500) })
  }
}
for (const [name, run] of Object.entries(refused)) {
  try {
    write(name, 'failed', { accepted: shape(await run()) })
  } catch (error) {
    write(name, 'passed', refusal(error))
  }
}
