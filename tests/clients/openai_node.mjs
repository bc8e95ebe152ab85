// The official OpenAI SDK for Node.js, and the AI SDK by way of its OpenAI-compatible provider. Run by `run`, which
// copies it beside its node_modules:  node --test-reporter=tap openai_node.mjs URL MODEL KEY
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'

import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const [url, model, apiKey] = process.argv.slice(2)
const baseURL = `${url}/v1`
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 90_000 })
const provider = createOpenAICompatible({
  name: 'pellucid', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
})
const messages = [{ role: 'user', content: 'What is gravity?' }]
const greedy = { model, messages, max_tokens: 16, temperature: 0 }
const Person = z.object({ name: z.string().max(24), age: z.int().min(0).max(130), mood: z.enum(['calm', 'sad']) })
const Weather = z.object({ city: z.enum(['Paris', 'Oslo']), unit: z.enum(['celsius', 'fahrenheit']) })

/** How many requests run or wait in the engine, as /metrics says. */
async function requestsInEngine() {
  const text = await (await fetch(`${url}/metrics`)).text()
  const found = [...text.matchAll(/^\w+:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$/gm)]
  assert.ok(found.length >= 2, '/metrics has no num_requests_running and num_requests_waiting')
  return found.reduce((sum, [, value]) => sum + Number(value), 0)
}

async function waitUntilIdle() {
  const deadline = Date.now() + 5000
  while (await requestsInEngine()) {
    assert.ok(Date.now() < deadline, 'requests are still in the engine after 5 s')
    await sleep(50)
  }
}

test('openai: the deltas of a stream add up to the answer, usage comes last', async () => {
  const whole = await client.chat.completions.create(greedy)
  assert.equal(whole.choices[0].finish_reason, 'length')
  assert.equal(whole.usage.completion_tokens, 16)
  const chunks = []
  const options = { ...greedy, stream: true, stream_options: { include_usage: true } }
  for await (const chunk of await client.chat.completions.create(options)) chunks.push(chunk)
  assert.equal(chunks[0].choices[0].delta.role, 'assistant')
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join('')
  assert.equal(text, whole.choices[0].message.content)
  const last = chunks.at(-1)
  assert.deepEqual([last.choices, last.usage.total_tokens], [[], whole.usage.total_tokens])
})

test('openai: parse gives an object that the schema accepts', async () => {
  const answer = await client.chat.completions.parse({
    model, messages, temperature: 0, response_format: zodResponseFormat(Person, 'person'),
  })
  assert.ok(Person.safeParse(answer.choices[0].message.parsed).success)
})

test('openai: a required tool is called with valid arguments', async () => {
  const tools = [{ type: 'function', function: { name: 'weather', parameters: z.toJSONSchema(Weather) } }]
  const answer = await client.chat.completions.create({ ...greedy, max_tokens: 200, tools, tool_choice: 'required' })
  const [call] = answer.choices[0].message.tool_calls
  assert.equal(answer.choices[0].finish_reason, 'tool_calls')
  assert.ok(Weather.safeParse(JSON.parse(call.function.arguments)).success, call.function.arguments)
})

test('openai: the stream helper ends with the whole completion', async () => {
  const whole = await client.chat.completions.create(greedy)
  const stream = client.chat.completions.stream(greedy)
  let events = 0
  stream.on('content', () => { events += 1 })
  const final = await stream.finalChatCompletion()
  assert.ok(events > 4)
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content)
})

test('openai: errors keep their class, param and code', async () => {
  await assert.rejects(client.chat.completions.create({ ...greedy, model: 'no-such-model' }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError)
    assert.deepEqual([error.status, error.param], [404, 'model'])
    assert.ok(error.code)
    assert.match(error.message, /no-such-model/)
    return true
  })
  await assert.rejects(client.chat.completions.create({ ...greedy, max_tokens: 10_000_000 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError)
    assert.deepEqual([error.param, error.type], ['max_tokens', 'invalid_request_error'])
    return true
  })
})

test('openai: a stream that is aborted frees its place in the engine', async () => {
  const controller = new AbortController()
  const stream = await client.chat.completions.create(
    { ...greedy, max_tokens: 1500, ignore_eos: true, stream: true }, { signal: controller.signal },
  )
  let count = 0
  for await (const _ of stream) {
    if (++count === 4) {
      await sleep(1000)
      assert.ok((await requestsInEngine()) >= 1, 'the request is not counted')
      controller.abort()
    }
  }
  await waitUntilIdle()
})

test('openai: responses stream their text', async () => {
  const options = { model, input: 'What is gravity?', max_output_tokens: 12, temperature: 0 }
  const whole = await client.responses.create(options)
  let text = ''
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta
  }
  assert.ok(text)
  assert.equal(text, whole.output_text)
})

test('ai-sdk: generateText tells text, usage and the reason of its end', async () => {
  const { text, usage, finishReason } = await generateText({
    model: provider(model), prompt: 'What is gravity?', maxOutputTokens: 16, temperature: 0, maxRetries: 0,
  })
  const whole = await client.chat.completions.create(greedy)
  assert.equal(text, whole.choices[0].message.content)
  assert.deepEqual([finishReason, usage.outputTokens, usage.inputTokens], ['length', 16, whole.usage.prompt_tokens])
})

test('ai-sdk: streamText adds up to the same text', async () => {
  const result = streamText({
    model: provider(model), prompt: 'What is gravity?', maxOutputTokens: 16, temperature: 0, maxRetries: 0,
  })
  let [text, pieces] = ['', 0]
  for await (const delta of result.textStream) [text, pieces] = [text + delta, pieces + 1]
  const whole = await client.chat.completions.create(greedy)
  assert.ok(pieces > 4)
  assert.equal(text, whole.choices[0].message.content)
  assert.equal((await result.usage).outputTokens, 16)
  assert.equal(await result.finishReason, 'length')
})

test('ai-sdk: generateObject gives an object that the schema accepts', async () => {
  const { object } = await generateObject({
    model: provider(model), schema: Person, prompt: 'Describe Ada Lovelace.', temperature: 0, maxRetries: 0,
  })
  assert.ok(Person.safeParse(object).success)
})

test('ai-sdk: a tool runs with the arguments of its streamed call', async () => {
  let received
  const weather = tool({
    description: 'Tell the weather in a city.', inputSchema: Weather,
    execute: async (input) => { received = input; return '18 degrees' },
  })
  const result = streamText({
    model: provider(model), prompt: 'What is the weather in Paris?', tools: { weather }, temperature: 0, maxRetries: 0,
    toolChoice: { type: 'tool', toolName: 'weather' }, maxOutputTokens: 200,
  })
  const kinds = new Set()
  for await (const part of result.fullStream) kinds.add(part.type)
  assert.ok(kinds.has('tool-input-delta') && kinds.has('tool-call') && kinds.has('tool-result'), [...kinds].join(' '))
  assert.ok(Weather.safeParse(received).success)
})
